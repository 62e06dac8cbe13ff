// Per-call checks of all modules and parameters of a model, which would take several times as long in Python.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <vector>

namespace {

// `places(tensors)`: address, dtype, sizes and strides of each tensor in a list, as bytes for comparison.
PyObject* places(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  if (!PyList_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "places takes a list of tensors");
    return nullptr;
  }
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* const item = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(item)) {
      PyErr_Format(PyExc_TypeError, "places takes a list of tensors, and item %zd is none", i);
      return nullptr;
    }
    const at::Tensor& tensor = THPVariable_Unpack(item);
    found.insert(found.end(), {reinterpret_cast<int64_t>(tensor.const_data_ptr()),
                               static_cast<int64_t>(tensor.scalar_type()), tensor.dim()});
    found.insert(found.end(), tensor.sizes().begin(), tensor.sizes().end());
    found.insert(found.end(), tensor.strides().begin(), tensor.strides().end());
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()),
                                   static_cast<Py_ssize_t>(found.size() * sizeof(int64_t)));
  END_HANDLE_TH_ERRORS
}

// `has_true(dicts, names)`: whether any dict of a list has a true value under one of the names; each dict has all
// names.
PyObject* has_true(PyObject*, PyObject* arguments) {
  PyObject *dicts, *names;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &dicts, &PyTuple_Type, &names)) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts); ++i) {
    PyObject* const dict = PyList_GET_ITEM(dicts, i);
    if (!PyDict_Check(dict)) {
      PyErr_Format(PyExc_TypeError, "has_true takes a list of dicts, and item %zd is none", i);
      return nullptr;
    }
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(names); ++n) {
      PyObject* const name = PyTuple_GET_ITEM(names, n);
      PyObject* const value = PyDict_GetItemWithError(dict, name);
      if (value == nullptr) {
        if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, name);
        return nullptr;
      }
      const int is_true = PyObject_IsTrue(value);
      if (is_true != 0) return is_true < 0 ? nullptr : Py_NewRef(Py_True);
    }
  }
  Py_RETURN_FALSE;
}

}  // namespace
