// An empty Python module, so that the usual build and install machinery ships this library; nothing imports it.
// Without Python's headers the library still builds: it is loaded as a plain shared library, and only `import` would
// fail.
#if __has_include(<Python.h>)
#include <Python.h>

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__native() {
  return PyModule_Create(&definition);
}
#else
extern "C" __attribute__((visibility("default"))) void *PyInit__native() {
  return nullptr;
}
#endif
