// What `links.cpp` does of `_origin/links.py` for the sources beside it.

#pragma once

#include "../../_native/objects.h"

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>

namespace opintercept {

using Addresses = c10::ArrayRef<const void*>; // of the positional arguments; null for what is not a tensor

PyObject* in_python(const void* address);
PyObject* in_python(Addresses addresses);
PyObject* in_python(c10::ArrayRef<size_t> numbers);

// The forward call of a backward call.
struct Forward {
  THPObjectPtr place;
  int64_t index = -1; // -1 if it is not known
  int8_t grad_of = -1; // as in `Row`
};

bool is_packing(); // as `links._packing`

// As `Links.add`, with the positions of the arguments that need a gradient. False, with nothing changed, if that has to
// be asked.
bool link(
    PyObject* links, PyObject* op, int64_t index, Addresses operands, c10::ArrayRef<size_t> wanted, PyObject* place);

// As `Origin.forward_of`, likewise.
bool find_forward(PyObject* links, Addresses operands, const void* left, Forward& found);

} // namespace opintercept
