// `_core.record.signature_of` for values that are not Python objects, for the sources beside `record.cpp`.

#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace opintercept {

// Add to a key what tells calls with this argument or output from those that do not look alike. False for a value
// that the key cannot describe.
bool look_at(std::string& key, const c10::IValue& value);

} // namespace opintercept
