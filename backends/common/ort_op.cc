#include "ort_op.h"

#include <algorithm>
#include <new>

namespace trivet {
namespace {

const char* type_name(ONNXTensorElementDataType type) {
  switch (type) {
    case kFloat:
      return "float32";
    case kInt32:
      return "int32";
    case kInt64:
      return "int64";
    case kUint8:
      return "uint8";
    default:
      return "another type";
  }
}

std::string shape_to_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); i++) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? "any" : std::to_string(shape[i]);
  }
  return text + "]";
}

void throw_if(const OrtApi& api, OrtStatus* status, const std::string& what) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw OpError(what + ": " + message);
}

}  // namespace

int64_t Tensor::size() const {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

std::string Tensor::shape_text() const { return shape_to_text(shape); }

void Tensor::check_shape(std::initializer_list<int64_t> dims) const {
  bool same = dims.size() == shape.size();
  for (size_t i = 0; same && i < shape.size(); i++) {
    same = dims.begin()[i] < 0 || dims.begin()[i] == shape[i];
  }
  if (!same) {
    throw OpError(std::string(name) + ": expected shape " + shape_to_text({dims.begin(), dims.size()}) + ", got " +
                  shape_text());
  }
}

void Tensor::check_type(ONNXTensorElementDataType wanted) const {
  if (type != wanted) {
    throw OpError(std::string(name) + ": expected " + type_name(wanted) + ", got " + type_name(type));
  }
}

void KernelInfo::check(OrtStatus* status, const char* name) const {
  throw_if(api_, status, std::string("attribute '") + name + "'");
}

int64_t KernelInfo::attr_int(const char* name) const {
  int64_t value = 0;
  check(api_.KernelInfoGetAttribute_int64(info_, name, &value), name);
  return value;
}

float KernelInfo::attr_float(const char* name) const {
  float value = 0;
  check(api_.KernelInfoGetAttribute_float(info_, name, &value), name);
  return value;
}

std::string KernelInfo::attr_string(const char* name) const {
  size_t size = 0;
  check(api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size), name);
  std::string value(size, '\0');
  check(api_.KernelInfoGetAttribute_string(info_, name, value.data(), &size), name);
  value.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
  return value;
}

std::vector<int64_t> KernelInfo::attr_ints(const char* name) const {
  size_t size = 0;
  check(api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size), name);
  std::vector<int64_t> values(size);
  if (size > 0) check(api_.KernelInfoGetAttributeArray_int64(info_, name, values.data(), &size), name);
  return values;
}

std::vector<std::string> KernelInfo::attr_names(const char* name) const {
  const std::string joined = attr_string(name);
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= joined.size();) {
    const size_t end = std::min(joined.find(',', begin), joined.size());
    names.push_back(joined.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

std::string KernelInfo::node_name() const {
  size_t size = 0;
  OrtStatus* status = api_.KernelInfo_GetNodeName(info_, nullptr, &size);
  if (status != nullptr) api_.ReleaseStatus(status);
  std::string value(size, '\0');
  throw_if(api_, api_.KernelInfo_GetNodeName(info_, value.data(), &size), "node name");
  value.resize(size > 0 ? size - 1 : 0);
  return value;
}

namespace {

Tensor view(const OrtApi& api, OrtValue* value, const TensorSpec& spec) {
  Tensor tensor{spec.name, ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, nullptr, {}};
  const int64_t* dims = nullptr;
  size_t rank = 0;
  throw_if(api, api.GetTensorElementTypeAndShapeDataReference(value, &tensor.type, &dims, &rank), spec.name);
  tensor.shape = {dims, rank};
  throw_if(api, api.GetTensorMutableData(value, &tensor.data), spec.name);
  return tensor;
}

}  // namespace

bool KernelInfo::has_input(size_t index) const {
  size_t count = 0;
  throw_if(api_, api_.KernelInfo_GetInputCount(info_, &count), "input count");
  if (index >= count) return false;
  size_t size = 0;  // of the name, with the terminating zero; an absent input has an empty one
  OrtStatus* status = api_.KernelInfo_GetInputName(info_, index, nullptr, &size);
  if (status != nullptr) api_.ReleaseStatus(status);
  return size > 1;
}

std::optional<Tensor> KernelInfo::constant_input(size_t index) const {
  if (!has_input(index)) return std::nullopt;
  int is_constant = 0;
  const OrtValue* value = nullptr;
  throw_if(api_, api_.KernelInfoGetConstantInput_tensor(info_, index, &is_constant, &value), inputs_[index].name);
  if (is_constant == 0) return std::nullopt;
  return view(api_, const_cast<OrtValue*>(value), inputs_[index]);
}

bool KernelContext::has_input(size_t index) const {
  const OrtValue* value = nullptr;
  size_t count = 0;
  throw_if(api_, api_.KernelContext_GetInputCount(context_, &count), "input count");
  if (index >= count) return false;
  throw_if(api_, api_.KernelContext_GetInput(context_, index, &value), inputs_[index].name);
  return value != nullptr;
}

Tensor KernelContext::input(size_t index) const {
  const OrtValue* value = nullptr;
  throw_if(api_, api_.KernelContext_GetInput(context_, index, &value), inputs_[index].name);
  if (value == nullptr) throw OpError(std::string(inputs_[index].name) + ": input is absent");
  // The C API has one accessor for both; an input is only written through an alias that the op declares.
  return view(api_, const_cast<OrtValue*>(value), inputs_[index]);
}

Tensor KernelContext::output(size_t index, std::span<const int64_t> shape) const {
  OrtValue* value = nullptr;
  throw_if(api_, api_.KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value),
           outputs_[index].name);
  const Tensor tensor = view(api_, value, outputs_[index]);
  // onnxruntime passes on the null of a provider's allocator that has no memory left.
  if (tensor.data == nullptr && tensor.size() > 0) {
    throw OpError(std::string(tensor.name) + ": there is no memory for shape " + tensor.shape_text());
  }
  return tensor;
}

Tensor KernelContext::output(size_t index, std::initializer_list<int64_t> shape) const {
  return output(index, std::span<const int64_t>(shape.begin(), shape.size()));
}

namespace {

struct ScratchBuffer {
  static constexpr std::align_val_t kAlignment{64};
  void* data = nullptr;
  size_t size = 0;
  ~ScratchBuffer() { release(); }
  void release() {
    ::operator delete(data, kAlignment);
    data = nullptr;
    size = 0;
  }
};

}  // namespace

void* ThreadScratch::bytes(int slot, size_t size) {
  thread_local ScratchBuffer buffers[kSlots];
  ScratchBuffer& buffer = buffers[slot];
  if (size > buffer.size || buffer.data == nullptr) {
    const size_t rounded = (size + size / 4 + 4095) / 4096 * 4096 + 4096;
    buffer.release();
    buffer.data = ::operator new(rounded, ScratchBuffer::kAlignment);
    buffer.size = rounded;
  }
  return buffer.data;
}

namespace detail {

OrtStatus* make_status(const OrtApi& api, OrtErrorCode code, const std::string& message) {
  return api.CreateStatus(code, message.c_str());
}

OrtStatus* status_of_exception(const OrtApi& api, const char* op, const std::string& node) {
  const std::string where = node.empty() ? std::string(op) : std::string(op) + " '" + node + "'";
  try {
    throw;
  } catch (const OpError& error) {
    return make_status(api, ORT_INVALID_ARGUMENT, where + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return make_status(api, ORT_FAIL, where + ": out of memory");
  } catch (const std::exception& error) {
    return make_status(api, ORT_FAIL, where + ": " + error.what());
  } catch (...) {
    return make_status(api, ORT_FAIL, where + ": unknown error");
  }
}

}  // namespace detail
}  // namespace trivet
