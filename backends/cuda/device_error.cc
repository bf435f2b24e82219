// Messages of the errors that kernels report: the words of every back end.
#include "../common/op_messages.h"
#include "../common/op_specs.h"
#include "context.h"

namespace trivet::cuda {
namespace {

using Spec = SampleSpec;

// Inputs of Sample, by SampleList.
constexpr Spec::Input kIds[] = {Spec::kHistory, Spec::kAllowed, Spec::kBanned, Spec::kBiasIds};
constexpr Spec::Input kLocs[] = {Spec::kHistoryLoc, Spec::kAllowedLoc, Spec::kBannedLoc, Spec::kBiasLoc};

const char* ids_name(int64_t list) { return Spec::kInputs[kIds[list]].name; }
const char* loc_name(int64_t list) { return Spec::kInputs[kLocs[list]].name; }

std::string sample_number(const DeviceError& e) {
  const auto which = static_cast<SampleNumber>(e.b);
  const bool whole = which >= kTopK && which <= kNumPromptTokens;
  return whole ? messages::sample_int(which, e.a, e.c, e.d) : messages::sample_float(which, e.a, e.value);
}

}  // namespace

std::string describe(const DeviceError& e) {
  switch (e.code) {
    case DeviceErrorCode::kTokenId:
      return messages::token_id(e.a, e.b, e.c);
    case DeviceErrorCode::kRowIndex:
      return messages::row_index(e.a, e.b, e.c);
    case DeviceErrorCode::kPosition:
      return messages::position(e.a, e.b, e.c, e.d);
    case DeviceErrorCode::kNegativePosition:
      return messages::negative_position(e.a, e.b);
    case DeviceErrorCode::kQueryStartFirst:
      return messages::query_start_first(e.b);
    case DeviceErrorCode::kQueryStart:
      return messages::query_start(e.a, e.b, e.c, e.d);
    case DeviceErrorCode::kQueryStartLast:
      return messages::query_start_last(e.a, e.b, e.c);
    case DeviceErrorCode::kSeqLen:
      return messages::seq_len(e.a, e.b, e.c);
    case DeviceErrorCode::kSlot:
      return messages::slot(e.a, e.b, e.c);
    case DeviceErrorCode::kBlock:
      return messages::block(e.a, e.b, e.c, e.d);
    case DeviceErrorCode::kBlockColumns:
      return messages::block_columns(e.a, e.b, e.c, e.d);
    case DeviceErrorCode::kSampleNumber:
      return sample_number(e);
    case DeviceErrorCode::kSampleLocEnds:
      return messages::list_ends(loc_name(e.a), e.b, e.c, e.d);
    case DeviceErrorCode::kSampleLoc:
      return messages::list_loc(loc_name(e.a % kSampleLists), e.a / kSampleLists, e.b, e.c, e.d);
    case DeviceErrorCode::kSampleId:
      return messages::list_id(ids_name(e.b), e.a, e.c, e.d);
    case DeviceErrorCode::kNothingLeft:
      return messages::in_row(e.a, messages::kNoTokenLeft);
    case DeviceErrorCode::kProcessedInvalid:
      return messages::in_row(e.a, messages::kProcessedInvalid);
    case DeviceErrorCode::kTemperatureOverflow:
      return messages::in_row(e.a, messages::kTemperatureOverflow);
    case DeviceErrorCode::kNone:
      break;
  }
  return "unknown error";
}

}  // namespace trivet::cuda
