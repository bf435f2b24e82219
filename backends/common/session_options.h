// Settings of a session that op libraries read (backends/contract/opset.py, SESSION_*).
#pragma once

#include <string>

#include "ort_op.h"

namespace trivet {

// Throws OpError with the status's message.
void check_status(const OrtApi& api, OrtStatus* status);
// "" = the entry is not there.
std::string config_entry(const OrtApi& api, const OrtSessionOptions* options, const char* key);
// "" = the default.
ActivationDtype parse_activation_dtype(const std::string& text);

}  // namespace trivet
