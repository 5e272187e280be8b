// `_origin.stack.walk` without the interpreter's lock, for the sources beside `stack.cpp`.

#pragma once

#include <Python.h>

#include <array>

namespace opintercept {

// As `_origin.stack.Walked`, with null for what does not exist. All of it is borrowed from the frames of this thread.
struct Walked {
  PyObject *module = nullptr, *root = nullptr, *code = nullptr;
  int instruction = -1;

  // Of a call in a wrapper of Inductor, what else decides where it comes from: the function of AOTAutograd that runs the
  // wrapper, and the program's code that calls it, see `_origin.origin`. Then the modules are those around the graph.
  bool generated = false;
  PyObject *function = nullptr, *caller = nullptr;
  int caller_instruction = -1;
  const void* wrapper = nullptr; // its frame, which is not compared

  // Modules that a compiled function has, of those places that depend on them.
  std::array<PyObject*, 2> inside{};
};

// A name by which a compiled function has a module, see `_origin.origin.Needs`.
struct ModuleName {
  bool global;
  PyObject* name; // interned
};

// The module that the nearest frame around a wrapper with a module by this name has there, or null; as
// `_origin.origin._nearest`. With the interpreter's lock.
PyObject* find_module(const Walked& walked, const ModuleName& name);

// Where the innermost frame of Python is: its globals, its code and the instruction. False if that cannot be told.
struct Here {
  PyObject *globals, *code;
  int instruction;
};
bool find_here(Here& here);

// Walks the stack of this thread, whether or not it holds the lock. False if only a walk with the lock can tell.
bool walk_here(Walked& walked);

// Whether a checkpoint runs in backward, as `_origin.stack.backward_phase` tells. May be true where only Python can
// tell.
bool is_recompute();

} // namespace opintercept
