// What the parts of the Python binding share. Types and docstrings are in
// python/afd_comm/_core.pyi.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "afd_comm/region.h"

namespace afd_comm {

// One per file python_*.cc.
void bind_bench(nanobind::module_& m);
void bind_group(nanobind::module_& m);
void bind_link(nanobind::module_& m);
void bind_region(nanobind::module_& m);
void bind_trace(nanobind::module_& m);
void bind_verbs(nanobind::module_& m);

// The Python type Header: all that came with a message.
struct Received {
  Header header;
  Times times;
};

inline bool signals_pending() {
  const nanobind::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Python runs signal handlers on the main thread only; the others need not touch the GIL while they
// wait.
inline Interrupt interrupt() { return syscall(SYS_gettid) == getpid() ? signals_pending : nullptr; }

// Below this a copy is shorter than handing the GIL over and getting it back.
constexpr uint64_t kCopyWithGil = 64 * 1024;

// `parts`: a list of (offset, ptr, nbytes), whose sum becomes header.nbytes.
Message message_of(uint32_t slot, uint64_t flag, int32_t layer, int32_t micro_batch, int32_t rows,
                   int32_t depth, int32_t kind, int32_t dtype, int64_t step, nanobind::list parts);

inline uint64_t as_u64(PyObject* object) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred())
    throw nanobind::python_error();
  return value;
}

}  // namespace afd_comm
