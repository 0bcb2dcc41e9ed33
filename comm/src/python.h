// What the files of the Python binding share. Types and docstrings are in
// python/afd_comm/_core.pyi.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "afd_comm/region.h"

namespace afd_comm {

// One per file python_*.cc.
void bind_bench(nanobind::module_& m);
void bind_group(nanobind::module_& m);
void bind_link(nanobind::module_& m);
void bind_message(nanobind::module_& m);
void bind_region(nanobind::module_& m);
void bind_step_gate(nanobind::module_& m);
void bind_trace(nanobind::module_& m);
void bind_verbs(nanobind::module_& m);

// The Python type Header: what the receiver knows about a message besides its payload.
struct Received {
  Header header;
  Times times;
};

inline Echo echo_of(const Received* answered) {
  return answered == nullptr ? Echo{} : Echo{answered->times.posted, answered->times.arrived};
}

inline bool signals_pending() {
  const nanobind::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Python runs signal handlers on the main thread only; other threads need not take the GIL while
// they wait.
inline Interrupt interrupt() { return syscall(SYS_gettid) == getpid() ? signals_pending : nullptr; }

// Up to this size a copy takes less time than releasing and reacquiring the GIL.
constexpr uint64_t kCopyWithGil = 64 * 1024;

// numpy arrays with one entry per message.
using Slots =
    nanobind::ndarray<const uint32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Flags =
    nanobind::ndarray<const uint64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// The user words, in hex and as the Python type bytes.
std::string user_text(const std::array<uint64_t, kUserWords>& user);
inline nanobind::bytes user_bytes(const std::array<uint64_t, kUserWords>& user) {
  return nanobind::bytes(user.data(), sizeof user);
}

inline uint64_t as_u64(PyObject* object) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred())
    throw nanobind::python_error();
  return value;
}

}  // namespace afd_comm
