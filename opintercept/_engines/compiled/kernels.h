// What the kernel's two ways share: `kernels.cpp` runs hooks around a call, `noted.cpp` notes it for them.

#pragma once

#include "../../_native/objects.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SafePyObject.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace opintercept {

using Stack = std::vector<c10::IValue>;
using ScopePtr = std::shared_ptr<c10::SafePyObject>;

inline const std::string KEY = "opintercept";

// The scope for hooks, while a kernel has stashed it and so owns it. No block sees a call that finds it in place.
extern thread_local PyObject* hidden_here;

// Whether an operator of a noted call runs in this thread: nothing sees its inner steps.
extern thread_local bool inside_noted;

// How Python sees an integer argument.
enum class Kind : char { OTHER, DTYPE, LAYOUT, MEMORY_FORMAT };

// What Python knows of an overload. Made when it is first asked for: a block may install two thousand kernels.
struct Described {
  PyObject* overload;
  PyObject* redispatch; // (raw key set, *args, **kwargs), for arguments that a hook has replaced
  std::vector<PyObject*> names;
  std::vector<Kind> kinds;
  std::vector<std::optional<c10::IValue>> defaults; // a schema that is unloaded takes its own with it
};

struct Overload {
  PyObject* name;
  bool foreign; // whether its library may be unloaded, and loaded again with another schema
  size_t number; // counts the overloads, see `prepared`
  bool constructs; // whether torch makes objects of subclasses from its output, see `kernels.CONSTRUCTORS`
  size_t count = 0, positional = 0; // arguments
  std::vector<size_t> writes; // the arguments that it may write to: those of its schema, and all of another library's
  bool generated = false; // whether it is no operator but the launch of a generated kernel, see `launches.cpp`
  c10::KernelFunction kernel; // one for ever: a library may be unloaded while a thread runs its operator
  mutable const Described* described = nullptr;

  const Described& in_python() const; // with the interpreter's lock
};

extern std::atomic<bool> has_tasks; // whether a task of an event loop has blocks of its own
extern size_t prepared; // how many overloads there are

ScopePtr shared(PyObject* scope);
PyObject* object_of(const ScopePtr& scope); // borrowed
bool in_backward(); // whether autograd runs a graph
std::pair<int64_t, std::string> running_node(); // the graph, or -1, and the name of the node, as autograd has it
bool is_cast(const at::Tensor* lhs); // `_origin.autocast.autocast_below`

// Puts the scope for hooks in place of that of the thread. Hooks of several greenlets of a thread may run by turns, so
// that nothing here goes back to what was there before: that may have been freed.
struct Hidden {
  const ScopePtr& scope;

  Hidden(const ScopePtr& hidden, PyObject* object, const ScopePtr& now) : scope(now) {
    at::impl::ThreadLocalPythonObjects::set(KEY, hidden);
    hidden_here = object;
  }
  ~Hidden() {
    hidden_here = nullptr;
    at::impl::ThreadLocalPythonObjects::set(KEY, scope);
  }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;
};

// The values as torch hands them to kernels in Python: without trailing defaults and the defaults of keyword arguments.
PyObject* positional_of(const Overload& overload, const c10::IValue* values); // a tuple
PyObject* keywords_of(const Overload& overload, const c10::IValue* values); // a dict
PyObject* outputs_to_python(const Overload& overload, const Stack& stack, size_t count);

// Calls `use` for each tensor of an argument or output, in lists too.
template <typename Use>
void each_tensor(const c10::IValue& value, const Use& use) {
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      each_tensor(item, use);
    }
  } else if (value.isTensor() && value.toTensor().defined()) {
    use(value.toTensor());
  }
}

// Runs a call and notes it for hooks that need no more. False, with nothing changed, if the hooks have to see it. `run`
// puts so many outputs in the place of the arguments.
bool ran_noted(
    const Overload& overload, c10::function_ref<void(Stack*)> run, size_t returns, Stack* stack, const ScopePtr& scope);

// Lets `ran_noted` know what sees the calls of an operator in a scope, from its `Watch`. Returns whether that is new.
bool remember(const Overload& overload, PyObject* scope, PyObject* watch);

} // namespace opintercept
