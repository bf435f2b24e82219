// Messages about bad values among an op's inputs, worded once for all back ends: which value, what was expected, what
// came.
#pragma once

#include <cstdint>
#include <string>

#include "op_types.h"

namespace trivet::messages {

std::string token_id(int64_t index, int64_t got, int64_t table_rows);
std::string row_index(int64_t index, int64_t got, int64_t x_rows);

std::string negative_position(int64_t index, int64_t got);
std::string position(int64_t index, int64_t got, int64_t expected, int64_t request);
std::string query_start_first(int64_t got);
std::string query_start(int64_t index, int64_t got, int64_t low, int64_t high);
std::string query_start_last(int64_t index, int64_t got, int64_t num_tokens);
std::string seq_len(int64_t request, int64_t got, int64_t num_scheduled);
std::string slot(int64_t index, int64_t got, int64_t last);
std::string block(int64_t request, int64_t column, int64_t got, int64_t last);
std::string block_columns(int64_t needed, int64_t request, int64_t seq_len, int64_t got);

// A float parameter that is not finite or out of its range.
std::string sample_float(SampleNumber which, int64_t row, float got);
// `bound`: the most that is allowed, where that depends on the step.
std::string sample_int(SampleNumber which, int64_t row, int64_t got, int64_t bound);
std::string list_ends(const char* loc_name, int64_t first, int64_t last, int64_t count);
std::string list_loc(const char* loc_name, int64_t index, int64_t got, int64_t low, int64_t high);
std::string list_id(const char* name, int64_t row, int64_t got, int64_t vocab);
// What a row of Sample can fail of; in_row() puts the row in front.
inline constexpr const char* kNoTokenLeft =
    "no token is left: allowed_token_ids, banned_token_ids and bitmask exclude every finite logit";
inline constexpr const char* kProcessedInvalid = "bias and penalties made a logit NaN or infinite";
inline constexpr const char* kTemperatureOverflow = "logits divided by the temperature overflow float32";
std::string in_row(int64_t row, const char* message);

}  // namespace trivet::messages
