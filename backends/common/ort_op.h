// Typed glue between a kernel class and onnxruntime's custom-op C API.
//
// A kernel is a class
//   struct RMSNorm {
//     static constexpr const char* kName = "RMSNorm";
//     static constexpr TensorSpec kInputs[] = {{"x", kFloat}, {"weight", kFloat}};
//     static constexpr TensorSpec kOutputs[] = {{"y", kFloat}};
//     static constexpr AliasSpec kAliases[] = {{0, 0}};      // optional: output shares the input's memory
//     RMSNorm(const KernelInfo& info, const SessionContext& session);
//     void compute(KernelContext& ctx);
//   };
// A constructor or compute() reports an error by `throw OpError(...)`; it reaches the caller of onnxruntime as a status
// "<op> '<node>': <message>". compute() may run on several threads at once: keep per-call state in ThreadScratch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#define ORT_API_MANUAL_INIT
#include "onnxruntime_c_api.h"
#undef ORT_API_MANUAL_INIT

#include "thread_pool.h"

namespace trivet {

// The version asked of the runtime and declared by the ops: one binary runs on every onnxruntime from 1.24 on.
inline constexpr uint32_t kOrtApiVersion = 24;

inline constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
inline constexpr auto kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
inline constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
inline constexpr auto kUint8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;

template <class T>
inline constexpr ONNXTensorElementDataType kTypeOf = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
template <>
inline constexpr ONNXTensorElementDataType kTypeOf<float> = kFloat;
template <>
inline constexpr ONNXTensorElementDataType kTypeOf<int32_t> = kInt32;
template <>
inline constexpr ONNXTensorElementDataType kTypeOf<int64_t> = kInt64;
template <>
inline constexpr ONNXTensorElementDataType kTypeOf<uint8_t> = kUint8;

class OpError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct TensorSpec {
  const char* name;
  ONNXTensorElementDataType type;
  bool optional = false;
};

struct AliasSpec {
  int input;
  int output;
};

enum class Tier : int;  // of the back end, e.g. cpu/dispatch.h

enum class ActivationDtype { kInt8, kFloat32 };

// What a session chose; lives as long as the process.
struct SessionContext {
  ThreadPool& pool;
  Tier tier;
  ActivationDtype activation_dtype;
};

// A tensor argument. `data` is null only for an empty tensor.
struct Tensor {
  const char* name;
  ONNXTensorElementDataType type;
  void* data;
  std::span<const int64_t> shape;

  int64_t size() const;
  std::string shape_text() const;
  // Throws unless the shape is `dims`; -1 matches any extent.
  void check_shape(std::initializer_list<int64_t> dims) const;
  template <class T>
  const T* as() const {
    check_type(kTypeOf<T>);
    return static_cast<const T*>(data);
  }
  template <class T>
  T* mutable_as() const {
    check_type(kTypeOf<T>);
    return static_cast<T*>(data);
  }

 private:
  void check_type(ONNXTensorElementDataType wanted) const;
};

// Attributes and constant inputs of a node, while its kernel is made. A missing attribute is an error.
class KernelInfo {
 public:
  KernelInfo(const OrtApi& api, const OrtKernelInfo* info, std::span<const TensorSpec> inputs)
      : api_(api), info_(info), inputs_(inputs) {}

  int64_t attr_int(const char* name) const;
  float attr_float(const char* name) const;
  std::string attr_string(const char* name) const;
  std::vector<int64_t> attr_ints(const char* name) const;
  // Names joined by commas in one string: lists of strings can be read from onnxruntime 1.25 on only.
  std::vector<std::string> attr_names(const char* name) const;
  std::string node_name() const;
  // Whether the node has this input; an optional one may be left out.
  bool has_input(size_t index) const;
  // The input if it is a constant of the graph; it is then the same at every call. Lives as long as the kernel.
  std::optional<Tensor> constant_input(size_t index) const;

 private:
  void check(OrtStatus* status, const char* name) const;

  const OrtApi& api_;
  const OrtKernelInfo* info_;
  std::span<const TensorSpec> inputs_;
};

// Inputs and outputs of one call of a kernel.
class KernelContext {
 public:
  KernelContext(const OrtApi& api, OrtKernelContext* context, std::span<const TensorSpec> inputs,
                std::span<const TensorSpec> outputs)
      : api_(api), context_(context), inputs_(inputs), outputs_(outputs) {}

  bool has_input(size_t index) const;
  Tensor input(size_t index) const;  // throws if it is absent
  Tensor output(size_t index, std::initializer_list<int64_t> shape) const;
  Tensor output(size_t index, std::span<const int64_t> shape) const;

 private:
  const OrtApi& api_;
  OrtKernelContext* context_;
  std::span<const TensorSpec> inputs_;
  std::span<const TensorSpec> outputs_;
};

// Scratch memory of the calling thread: 64-byte aligned, uninitialised, kept between calls, grown on demand. Each slot
// is one buffer; asking for a slot again invalidates what it held.
class ThreadScratch {
 public:
  static constexpr int kSlots = 9;
  template <class T>
  static T* get(int slot, int64_t count) {
    return static_cast<T*>(bytes(slot, static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  static void* bytes(int slot, size_t size);
};

namespace detail {

OrtStatus* make_status(const OrtApi& api, OrtErrorCode code, const std::string& message);
// Turns the exception in flight into a status.
OrtStatus* status_of_exception(const OrtApi& api, const char* op, const std::string& node);

template <class K>
constexpr std::span<const AliasSpec> aliases_of() {
  if constexpr (requires { K::kAliases; }) {
    return K::kAliases;
  } else {
    return {};
  }
}

}  // namespace detail

// What onnxruntime asks about the op of a class K with a kName, kInputs and kOutputs; how it runs is left to
// subclasses.
template <class K>
class OpSchema : public OrtCustomOp {
 public:
  OpSchema() : OrtCustomOp{} {
    version = kOrtApiVersion;
    OrtCustomOp::GetName = [](const OrtCustomOp*) { return K::kName; };
    OrtCustomOp::GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    OrtCustomOp::GetInputTypeCount = [](const OrtCustomOp*) { return std::size(K::kInputs); };
    OrtCustomOp::GetInputType = [](const OrtCustomOp*, size_t i) { return K::kInputs[i].type; };
    OrtCustomOp::GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(K::kOutputs); };
    OrtCustomOp::GetOutputType = [](const OrtCustomOp*, size_t i) { return K::kOutputs[i].type; };
    OrtCustomOp::GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return K::kInputs[i].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    OrtCustomOp::GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
    OrtCustomOp::GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    OrtCustomOp::GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    OrtCustomOp::GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
    OrtCustomOp::GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    OrtCustomOp::GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    OrtCustomOp::GetStartVersion = [](const OrtCustomOp*) { return 1; };
    OrtCustomOp::GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
  }
};

// The OrtCustomOp of kernel class K for one session context.
template <class K>
class Op : public OpSchema<K> {
 public:
  Op(const OrtApi& api, const SessionContext& session) : api_(api), session_(session) {
    OrtCustomOp::CreateKernelV2 = &Op::create;
    OrtCustomOp::KernelComputeV2 = &Op::run;
    OrtCustomOp::KernelDestroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
    if constexpr (!detail::aliases_of<K>().empty()) {
      OrtCustomOp::GetAliasMap = &Op::alias_map;
      OrtCustomOp::ReleaseAliasMap = [](int* in, int* out) {
        delete[] in;
        delete[] out;
      };
    }
  }

 private:
  struct Instance {
    const OrtApi& api;
    std::string node;
    K kernel;
  };

  static OrtStatus* ORT_API_CALL create(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* raw, void** kernel) {
    const auto& self = *static_cast<const Op*>(op);
    std::string node;
    try {
      const KernelInfo info(self.api_, raw, K::kInputs);
      node = info.node_name();
      *kernel = new Instance{self.api_, node, K(info, self.session_)};
      return nullptr;
    } catch (...) {
      return detail::status_of_exception(self.api_, K::kName, node);
    }
  }

  static OrtStatus* ORT_API_CALL run(void* kernel, OrtKernelContext* raw) {
    auto& self = *static_cast<Instance*>(kernel);
    try {
      KernelContext context(self.api, raw, K::kInputs, K::kOutputs);
      self.kernel.compute(context);
      return nullptr;
    } catch (...) {
      return detail::status_of_exception(self.api, K::kName, self.node);
    }
  }

  static size_t ORT_API_CALL alias_map(int** in, int** out) {
    constexpr auto kAliases = detail::aliases_of<K>();
    *in = new int[kAliases.size()];
    *out = new int[kAliases.size()];
    for (size_t i = 0; i < kAliases.size(); i++) {
      (*in)[i] = kAliases[i].input;
      (*out)[i] = kAliases[i].output;
    }
    return kAliases.size();
  }

  const OrtApi& api_;
  const SessionContext& session_;
};

}  // namespace trivet
