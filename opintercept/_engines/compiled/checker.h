// Checks the products of noted calls for `hooks.Checksum`, as `expect` and `screen` of `hooks.checksum.arithmetic` do.

#pragma once

#include "../../_native/checksums.h"
#include "../../_native/device/checks.h"
#include "kernels.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace opintercept {

// Where an operator's arguments are. Without a `lhs`, it is only counted.
struct Form {
  int lhs = -1, rhs = -1, bias = -1, beta = -1, alpha = -1;
  std::atomic<int64_t> skipped{0};
  const Overload* overload = nullptr;
  Form* next = nullptr; // made before this one
};

// The checksums of a weight, [columns, groups], and the factor that makes norms of rows of lhs norms of the product's.
struct Weighed {
  at::Tensor inner;
  std::vector<double> scale; // [batch, groups]
  bool remembered = false;
};

// When a row of a product on a device is suspect, and what is computed of it then: see `hooks.checksum.launches.Kind`.
struct Limits {
  double deviation = 0, limit = 0;
  int fields = 0;
  PyObject* kind = nullptr; // owned: what Python judges the row by

  Limits() = default;
  Limits(const Limits&) = delete;
  Limits& operator=(const Limits&) = delete;
  ~Limits();
};
using LimitsPtr = std::shared_ptr<const Limits>;

// What the checksums of a product should be, see `hooks.checksum.arithmetic.Expected`.
struct Checked {
  Form* form = nullptr;
  Weighed weight;
  at::Tensor middle;
  std::vector<double> sums, size; // [batch, rows, groups]
  int64_t batch = 1, rows = 0, depth = 0, columns = 0, groups = 1;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  bool wide = false; // in float64
  // Of a product on a device, all but the first and how many rows there are.
  std::unique_ptr<device::Product> product;
  LimitsPtr limits;
};

class Checker {
 public:
  // Set once, before any kernel sees this.
  double limit = 0; // in standard deviations
  bool exact = false;
  uint64_t every = 1;
  PyObject *signs_of = nullptr, *form_of = nullptr, *limits_of = nullptr; // owned

  std::atomic<int64_t> checked{0}, rows{0};
  static PyObject* keep_out; // `_engines.dynamo.keep_out`, for what kernels call

  // Before the operator runs. False if Python has to check the call; nothing is found for one that is not checked.
  bool expect(const Overload& overload, const c10::IValue* arguments, int64_t index, std::unique_ptr<Checked>& found);

  // After it has run: whether the output is as it should be. On a device, whether that will be known.
  bool agrees(Checked& expected, const c10::IValue* arguments, const c10::IValue& output);
  void count(const Checked& expected);

  // With the interpreter's lock.
  void forget(const at::Tensor& rhs, bool is_wide);
  PyObject* skipped(); // [(overload, count)]
  void clear();
  void forget_parent(); // in a forked child
  ~Checker();

 private:
  static constexpr size_t MOST_LOOKS = 1024;

  Form* form(const Overload& overload);
  const void* signs(int64_t columns, bool is_wide); // null if there are none to be had
  template <typename W>
  bool compute(
      Checked& found, const Matrices& lhs, const Matrices& rhs, const at::Tensor& right, const at::Tensor* bias,
      double alpha, double beta);
  template <typename W>
  bool add_bias(Checked& found, const at::Tensor& bias, double beta, const W* signs, std::vector<double>& smooth) const;
  bool begin(Checked& found, const device::Operands& operands);
  bool finish(Checked& expected, const c10::IValue* arguments, const at::Tensor& output);
  template <typename W>
  bool holds(const Checked& expected, const Matrices& output, const W* signs) const;

  std::mutex mutex; // never held while Python runs
  std::unordered_map<const Overload*, Form*> forms; // null for those that Python checks
  std::atomic<Form*> newest{nullptr}; // owns all, so that they can be read without the mutex, and in a forked child
  std::unordered_map<int64_t, at::Tensor> signs_by_columns[2]; // of float and double
  std::unordered_map<std::string, LimitsPtr> limits_by_look;
  Weights<Weighed> weights; // keys say whether they are wide
  std::shared_ptr<device::WeightsOnDevices> weights_on_devices = std::make_shared<device::WeightsOnDevices>();
};

// Adds torch's settings for the precision of products.
void look_at_precision(std::string& key);

// What a kernel has computed of the call that the hooks are shown now, for `Checker.taken`.
extern thread_local const Checked* handed_over;

PyObject* new_checker();
Checker* checker_of(PyObject* object); // of a Python object of its type; null for another

} // namespace opintercept
