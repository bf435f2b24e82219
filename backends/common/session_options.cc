#include "session_options.h"

namespace trivet {

void check_status(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw OpError(message);
}

std::string config_entry(const OrtApi& api, const OrtSessionOptions* options, const char* key) {
  int found = 0;
  check_status(api, api.HasSessionConfigEntry(options, key, &found));
  if (found == 0) return "";
  size_t size = 0;
  check_status(api, api.GetSessionConfigEntry(options, key, nullptr, &size));
  std::string value(size, '\0');
  check_status(api, api.GetSessionConfigEntry(options, key, value.data(), &size));
  value.resize(size > 0 ? size - 1 : 0);
  return value;
}

ActivationDtype parse_activation_dtype(const std::string& text) {
  if (text.empty() || text == "int8") return ActivationDtype::kInt8;
  if (text == "float32") return ActivationDtype::kFloat32;
  throw OpError("trivet.activation_dtype: expected 'int8' or 'float32', got '" + text + "'");
}

}  // namespace trivet
