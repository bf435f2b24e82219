// How a kernel on the device reports bad values among its inputs: the first report of a step is kept in pinned host
// memory; the host reads it when the step has ended and turns it into a message (device_error.cc).
#pragma once

#include <cstdint>

#include "../common/op_types.h"

namespace trivet::cuda {

enum class DeviceErrorCode : int32_t {
  kNone,
  kTokenId,           // input_ids[a] = b, table of c rows
  kRowIndex,          // rows[a] = b, x of c rows
  kPosition,          // positions[a] = b, expected c because of seq_lens[d]
  kNegativePosition,  // positions[a] = b
  kQueryStartFirst,   // query_start_loc[0] = b
  kQueryStart,        // query_start_loc[a] = b, expected c to d
  kQueryStartLast,    // query_start_loc[a] = b, expected c tokens
  kSeqLen,            // seq_lens[a] = b, fewer than the c scheduled tokens
  kSlot,              // slot_mapping[a] = b, expected -1 to c
  kBlock,             // block_table[a][b] = c, expected 0 to d
  kBlockColumns,      // block_table is narrower than the a columns that seq_lens[b] = c needs; it has d
  kSampleNumber,      // a number of row a is out of its range: b names it (SampleNumber), c or value is what came, d a
                      // bound
  kSampleLocEnds,     // boundaries of list a: first b, last c, expected 0 and d
  kSampleLoc,         // boundaries of list a % kSampleLists: [a / kSampleLists] = b, expected c to d
  kSampleId,          // a token id of row a in list b is c, vocabulary of d
  kNothingLeft,       // row a
  kProcessedInvalid,  // row a
  kTemperatureOverflow,  // row a
};

struct DeviceError {
  DeviceErrorCode code;
  int32_t node;  // of Context::nodes
  int64_t a, b, c, d;
  float value;
};

// Lists of Sample, in the order of its inputs.
enum SampleList : int32_t { kHistoryList, kAllowedList, kBannedList, kBiasList, kSampleLists };

}  // namespace trivet::cuda
