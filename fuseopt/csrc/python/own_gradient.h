// Autograd of eager calls of users' ops (fuseopt/extend): a node made in C++, whose backward calls Python. A
// torch.autograd.Function would run Python in the forward too, for longer than a small kernel's launch.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <type_traits>
#include <utility>
#include <vector>

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // shared_ptr, in newer releases of torch intrusive_ptr

// What a gradient of an op is: a tuple (gradients, reads_results, as_python_node).
//   gradients(arguments, results, grads, needed): a list with a gradient or None for each tensor of the arguments;
//   reads_results: whether `gradients` is to have the results, else it gets none;
//   as_python_node(arguments, results): the results as a torch.autograd.Function gives them.
enum GradientField { kGradients, kReadsResults, kAsPythonNode, kGradientFields };

bool is_gradient(PyObject* object) { return PyTuple_Check(object) && PyTuple_GET_SIZE(object) == kGradientFields; }

PyObject* checked(PyObject* object) {
  if (object != nullptr) return object;
  python_error error;
  error.persist();
  throw std::move(error);
}

class OwnNode : public Node {
 public:
  // `arguments`: a tuple without lists of tensors. Holds the GIL.
  OwnNode(PyObject* gradient, PyObject* arguments) : gradient_(Py_NewRef(gradient)) {
    const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
    others_ = checked(PyTuple_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const item = PyTuple_GET_ITEM(arguments, i);
      const bool is_tensor = THPVariable_Check(item);
      PyTuple_SET_ITEM(others_, i, Py_NewRef(is_tensor ? Py_None : item));
      if (!is_tensor) continue;
      const at::Tensor& tensor = THPVariable_Unpack(item);
      add_next_edge(torch::autograd::impl::gradient_edge(tensor));
      places_.push_back(i);
      saved_.emplace_back(tensor, /*is_output=*/false);
    }
  }

  ~OwnNode() override {
    if (!Py_IsInitialized()) return;
    const pybind11::gil_scoped_acquire gil;
    Py_DECREF(gradient_);
    Py_DECREF(others_);
  }

  // Makes the node that of a call's results: a tensor, or a tuple of them.
  void set_results(const NodePointer& self, PyObject* output) {
    const bool keeps = PyTuple_GET_ITEM(gradient_, kReadsResults) == Py_True, is_one = THPVariable_Check(output);
    const Py_ssize_t count = is_one ? 1 : PyTuple_GET_SIZE(output);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const at::Tensor& result = THPVariable_Unpack(is_one ? output : PyTuple_GET_ITEM(output, i));
      const uint32_t number = add_input_metadata(result);
      const bool varies = torch::autograd::isDifferentiableType(result.scalar_type());
      if (varies) torch::autograd::impl::set_gradient_edge(result, {self, number});
      if (keeps) results_.emplace_back(result, /*is_output=*/varies);
    }
  }

  std::string name() const override { return "CallBackward"; }

  variable_list apply(variable_list&& grads) override {
    const pybind11::gil_scoped_acquire gil;
    const THPObjectPtr arguments(unpacked_arguments()), results(tuple_of(unpacked_results()));
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    }
    const THPObjectPtr given(tuple_of(grads)), needed(checked(PyTuple_New(places_.size())));
    for (size_t i = 0; i < places_.size(); ++i) {
      PyTuple_SET_ITEM(needed.get(), i, PyBool_FromLong(should_compute_output(i)));
    }
    const THPObjectPtr found(checked(PyObject_CallFunctionObjArgs(
        PyTuple_GET_ITEM(gradient_, kGradients), arguments.get(), results.get(), given.get(), needed.get(), nullptr)));
    TORCH_CHECK(PyList_Check(found.get()) && PyList_GET_SIZE(found.get()) == static_cast<Py_ssize_t>(places_.size()),
                "the gradients of a user's op are not a list of one for each tensor");
    variable_list gradients(places_.size());
    for (size_t i = 0; i < places_.size(); ++i) {
      PyObject* const one = PyList_GET_ITEM(found.get(), i);
      TORCH_CHECK(one == Py_None || THPVariable_Check(one), "a gradient of a user's op is neither a tensor nor None");
      if (one != Py_None) gradients[i] = THPVariable_Unpack(one);
    }
    return gradients;
  }

  void release_variables() override {
    const pybind11::gil_scoped_acquire gil;  // also keeps others from reading them meanwhile
    for (SavedVariable& one : saved_) one.reset_data();
    for (SavedVariable& one : results_) one.reset_data();
    python_node_ = {};
  }

  // Compiled autograd traces the Python of a torch.autograd.Function, and has no access to this node.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const_cast<OwnNode*>(this)->python_node()->compiled_args(args);
  }
  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    return python_node()->apply_with_saved(grads, saved);
  }

 private:
  static PyObject* tuple_of(const variable_list& tensors) {
    PyObject* tuple = checked(PyTuple_New(tensors.size()));
    for (size_t i = 0; i < tensors.size(); ++i) PyTuple_SET_ITEM(tuple, i, THPVariable_Wrap(tensors[i]));
    return tuple;
  }

  PyObject* unpacked_arguments() const {
    variable_list tensors;  // unpacked first: that may throw
    for (const SavedVariable& one : saved_) tensors.push_back(one.unpack());
    PyObject* arguments = checked(PyTuple_New(PyTuple_GET_SIZE(others_)));
    size_t next = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(others_); ++i) {
      const bool is_tensor = next < places_.size() && places_[next] == i;
      PyTuple_SET_ITEM(arguments, i,
                       is_tensor ? THPVariable_Wrap(tensors[next++]) : Py_NewRef(PyTuple_GET_ITEM(others_, i)));
    }
    return arguments;
  }

  variable_list unpacked_results() {
    variable_list results;
    for (const SavedVariable& one : results_) results.push_back(one.unpack(getptr()));
    return results;
  }

  const NodePointer& python_node() {
    if (python_node_) return python_node_;
    const pybind11::gil_scoped_acquire gil;
    variable_list results = unpacked_results();
    for (uint32_t i = results.size(); i < num_inputs(); ++i) results.push_back(input_metadata(i).zeros_like());
    const THPObjectPtr arguments(unpacked_arguments()), given(tuple_of(results));
    const THPObjectPtr made(checked(PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(gradient_, kAsPythonNode),
                                                                 arguments.get(), given.get(), nullptr)));
    TORCH_CHECK(PyTuple_Check(made.get()), "as_python_node gives a tuple");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(made.get()) && !python_node_; ++i) {
      python_node_ = THPVariable_Unpack(PyTuple_GET_ITEM(made.get(), i)).grad_fn();
    }
    TORCH_CHECK(python_node_, "as_python_node gave results without a gradient");
    return python_node_;
  }

  PyObject *gradient_, *others_ = nullptr;  // the arguments, None in the place of tensors
  std::vector<Py_ssize_t> places_;          // of the tensors
  std::vector<SavedVariable> saved_, results_;
  NodePointer python_node_;
};

template <typename Pointer = NodePointer>
std::pair<OwnNode*, NodePointer> make_node(PyObject* gradient, PyObject* arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    auto* node = new OwnNode(gradient, arguments);
    return {node, Pointer(node, [](typename Pointer::element_type* dead) { deleteNode(dead); })};
  } else {
    auto node = c10::make_intrusive<OwnNode>(gradient, arguments);
    return {node.get(), Pointer(node)};
  }
}

}  // namespace
