// `_core.record.signature_of` for values that are not Python objects, for the sources beside `record.cpp`.

#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace opintercept {

// Add to a key what tells calls with this argument from those that do not look alike. False for a value that the key
// cannot describe. `fractions` says whether numbers with a fraction tell calls apart; those that are not finite do.
bool look_at(std::string& key, const c10::IValue& value, bool fractions = true);

// The same of an output, of which a number is not told.
bool look_at_output(std::string& key, const c10::IValue& value);

} // namespace opintercept
