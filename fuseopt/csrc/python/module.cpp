// The part of fuseopt that needs Python's tensors in C++. The stable ABI has no access to them, so this library is
// compiled for one release of torch and Python. It is one file, because most of its compile time goes into torch's
// headers.
#include "python/direct_calls.h"
#include "python/launches.h"
#include "python/own_ops.h"
#include "python/tape.h"
#include "python/watch.h"

namespace {

PyMethodDef functions[] = {
    {"places", places, METH_O, "places(tensors): addresses, dtypes and layouts of a list of tensors, as bytes"},
    {"has_true", has_true, METH_VARARGS, "has_true(dicts, names): whether one of the dicts has a true value by such a name"},
    {"call_ops", call_ops, METH_VARARGS, "call_ops(Op, EagerCalls): eager calls of users' ops run without Python"},
    {"run_own", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_own)), METH_FASTCALL,
     "run_own(op, kernel, arguments): the results of one kernel of a user's op"},
    {"record", record, METH_O, "record(function): runs a function of static tensors; a Tape that runs its operations again"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseopt_python", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fuseopt_python() {
  if (PyType_Ready(tape_type()) < 0) return nullptr;
  PyObject* created = PyModule_Create(&module);
  for (PyTypeObject* const type : {direct_calls_type(), launches_type()}) {
    if (created != nullptr && PyModule_AddType(created, type) < 0) Py_CLEAR(created);
  }
  return created;
}
