// What `values.cpp` reads of a tensor for other sources. Only `as_tensor` and `as_found` need the interpreter's lock.

#pragma once

#include <Python.h>

#include "vectors/read_values.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace opintercept {

// Whether a tensor is a plain array in memory, which begins at `data`: null for an empty one. It has no other keys than
// these: those of the CPU's plain tensors unless others are given.
bool in_memory(const at::Tensor& tensor, const void*& data);
bool in_memory(const at::Tensor& tensor, const c10::DispatchKeySet& keys, const void*& data);

// The tensor of an object of torch.Tensor, and an object for a tensor: a new reference, or null with an error.
const at::Tensor& unpacked(PyObject* tensor);
PyObject* wrapped(const at::Tensor& tensor);

// The tensor of a Python object. False if it is not one, or of a subclass.
bool as_tensor(PyObject* value, at::Tensor& tensor);

// Whether what is read of a tensor is kept until an operator writes to it, see `remembered.h`: no, yes, or yes, and it was
// written to by the operator that has just run.
enum class Keep { NOTHING, VALUES, WRITTEN };

// These return false for a tensor that they cannot read.
bool read_sums(
    const at::Tensor& tensor, const Target* target, bool hashed, bool zeros, Keep keeps, Sums& sums, uint64_t& hash);
bool find_range(const at::Tensor& tensor, Ends& ends);

// What `values.read` returns. Takes over the references; null if one of them is.
PyObject* as_found(const Sums& sums, PyObject* hash, PyObject* powers, PyObject* channels);

} // namespace opintercept
