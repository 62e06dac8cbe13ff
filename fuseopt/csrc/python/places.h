// `places(tensors)`: where each of a list of tensors lies and how many elements it has, as bytes to be compared. For what
// is asked of all of a model's parameters in every call: in Python that takes ten times as long.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <cstring>

namespace {

struct Place {
  const void* data;
  int64_t elements;
};

PyObject* places(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  if (!PyList_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "places takes a list of tensors");
    return nullptr;
  }
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  PyObject* const found = PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(Place)));
  if (found == nullptr) return nullptr;
  char* to = PyBytes_AS_STRING(found);
  for (Py_ssize_t i = 0; i < count; ++i, to += sizeof(Place)) {
    PyObject* const tensor = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(tensor)) {
      Py_DECREF(found);
      PyErr_Format(PyExc_TypeError, "places takes a list of tensors, and item %zd is none", i);
      return nullptr;
    }
    const at::Tensor& unpacked = THPVariable_Unpack(tensor);
    const Place place{unpacked.const_data_ptr(), unpacked.numel()};
    std::memcpy(to, &place, sizeof(place));
  }
  return found;
  END_HANDLE_TH_ERRORS
}

}  // namespace
