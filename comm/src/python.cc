// Python binding. Types and docstrings are in python/afd_comm/_core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "afd_comm/link.h"
#include "afd_comm/region.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

// Below this a copy is shorter than handing the GIL over and getting it back.
constexpr uint64_t kCopyWithGil = 64 * 1024;

bool signals_pending() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Python runs signal handlers on the main thread only; the others need not touch the GIL while they
// wait.
Interrupt interrupt() { return syscall(SYS_gettid) == getpid() ? signals_pending : nullptr; }

uint32_t checked_slot(const Region& region, int64_t slot) {
  if (slot < 0 || slot >= int64_t{region.slots()})
    throw nb::index_error(("slot " + std::to_string(slot) + " is outside of region '" +
                           region.name() + "', which has " + std::to_string(region.slots()) +
                           " slots")
                              .c_str());
  return static_cast<uint32_t>(slot);
}

uint64_t as_u64(PyObject* object) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw nb::python_error();
  return value;
}

// The (slot, flag) pairs of a wait; few of them need no allocation.
class AwaitedList {
 public:
  AwaitedList(const Region& region, nb::list slots, nb::list flags) : count_(slots.size()) {
    if (flags.size() != count_) throw nb::value_error("slots and flags must have the same length");
    if (count_ > kFew) many_.resize(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      const uint64_t flag = as_u64(PyList_GET_ITEM(flags.ptr(), static_cast<Py_ssize_t>(i)));
      if (flag == 0)
        throw nb::value_error(
            "flag 0 marks a slot never written; use make_flag(generation >= 1, seq)");
      const int64_t slot =
          PyLong_AsLongLong(PyList_GET_ITEM(slots.ptr(), static_cast<Py_ssize_t>(i)));
      if (slot == -1 && PyErr_Occurred()) throw nb::python_error();
      data()[i] = Awaited{checked_slot(region, slot), flag, Status::Deadline};
    }
  }
  Awaited* data() { return many_.empty() ? few_ : many_.data(); }
  std::size_t size() const { return count_; }

 private:
  static constexpr std::size_t kFew = 64;
  std::size_t count_;
  Awaited few_[kFew];
  std::vector<Awaited> many_;
};

void wait(Region& region, AwaitedList& awaited, WaitFor mode, int64_t timeout_us) {
  if (region.poll(awaited.data(), awaited.size(), mode)) return;
  const Interrupt on_signal = interrupt();
  bool interrupted = false;
  {
    const nb::gil_scoped_release release;
    interrupted =
        region.wait(awaited.data(), awaited.size(), mode, deadline_after_us(timeout_us), on_signal);
  }
  if (interrupted) throw nb::python_error();
}

nb::list wait_all(Region& region, nb::list slots, nb::list flags, int64_t timeout_us) {
  AwaitedList awaited(region, slots, flags);
  wait(region, awaited, WaitFor::All, timeout_us);
  nb::list out;
  for (std::size_t i = 0; i < awaited.size(); ++i) out.append(nb::cast(awaited.data()[i].status));
  return out;
}

int64_t wait_any(Region& region, nb::list slots, nb::list flags, int64_t timeout_us) {
  AwaitedList awaited(region, slots, flags);
  wait(region, awaited, WaitFor::Any, timeout_us);
  for (std::size_t i = 0; i < awaited.size(); ++i)
    if (awaited.data()[i].status == Status::Ok) return static_cast<int64_t>(i);
  return -1;
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig> buffer(Region& region, int64_t slot) {
  const uint32_t index = checked_slot(region, slot);
  // The array keeps the Region object, and with it the mapping, alive.
  return {region.payload(index), {static_cast<std::size_t>(region.slot_bytes())}, nb::find(region)};
}

void read_parts(nb::list parts, Message& message) {
  message.part_count = parts.size();
  if (message.part_count > kMaxParts)
    throw nb::value_error(("a message has at most " + std::to_string(kMaxParts) + " parts; got " +
                           std::to_string(message.part_count))
                              .c_str());
  uint64_t total = 0;
  for (std::size_t i = 0; i < message.part_count; ++i) {
    PyObject* item = PyList_GET_ITEM(parts.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3)
      throw nb::type_error("each part must be a tuple (offset, ptr, nbytes) of ints");
    Part& part = message.parts[i];
    part.offset = as_u64(PyTuple_GET_ITEM(item, 0));
    part.data =
        reinterpret_cast<const void*>(static_cast<uintptr_t>(as_u64(PyTuple_GET_ITEM(item, 1))));
    part.nbytes = as_u64(PyTuple_GET_ITEM(item, 2));
    if (part.data == nullptr && part.nbytes != 0)
      throw nb::value_error("a part with bytes has a null pointer");
    total += part.nbytes;  // may wrap; then some part is too large for any slot and is refused
  }
  message.header.nbytes = static_cast<int64_t>(total);
}

Status post(Link& link, uint32_t slot, uint64_t flag, int32_t layer, int32_t micro_batch,
            int32_t rows, int32_t depth, int32_t kind, int32_t dtype, int64_t step,
            nb::list parts) {
  Message message;
  message.slot = slot;
  message.flag = flag;
  message.header.layer = layer;
  message.header.micro_batch = micro_batch;
  message.header.rows = rows;
  message.header.depth = depth;
  message.header.kind = kind;
  message.header.dtype = dtype;
  message.header.step = step;
  read_parts(parts, message);
  if (!link.may_block() && static_cast<uint64_t>(message.header.nbytes) <= kCopyWithGil)
    return link.post(message);
  Status status;
  {
    const nb::gil_scoped_release release;
    status = link.post(message);
  }
  // A signal handler that ran during the wait may have raised.
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return status;
}

std::unique_ptr<Link> connect(std::vector<std::string> addresses, std::string backend,
                              std::optional<std::pair<uint32_t, uint32_t>> slots,
                              int64_t timeout_us) {
  LinkOptions options;
  options.backend = std::move(backend);
  if (slots) options.slots = SlotRange{slots->first, slots->second};
  if (slots && slots->second == 0)
    throw nb::value_error("slots=(first, count): count must be at least 1");
  options.timeout_us = timeout_us;
  // Not interrupt(): the link may later be used on the main thread.
  options.interrupt = signals_pending;
  std::unique_ptr<Link> link;
  try {
    const nb::gil_scoped_release release;
    link = open_link(addresses, options);
  } catch (const CommError&) {
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    throw;
  }
  return link;
}

std::string header_text(const Header& h) {
  const auto field = [](const char* name, int64_t value) {
    return std::string(name) + "=" + std::to_string(value);
  };
  return "Header(" + field("layer", h.layer) + ", " + field("micro_batch", h.micro_batch) + ", " +
         field("rows", h.rows) + ", " + field("depth", h.depth) + ", " + field("kind", h.kind) +
         ", " + field("dtype", h.dtype) + ", " + field("nbytes", h.nbytes) + ", " +
         field("step", h.step) + ", " + field("t_posted", h.t_posted) + ", " +
         field("t_arrived", h.t_arrived) + ")";
}

}  // namespace
}  // namespace afd_comm

NB_MODULE(_core, m) {
  using namespace afd_comm;
  // Regions alive at interpreter exit are normal: peers notice the end of the process.
  nb::set_leak_warnings(false);

  nb::exception<CommError>(m, "CommError", PyExc_RuntimeError);
  m.attr("MAX_PARTS") = kMaxParts;
  m.def("make_flag", &make_flag, "generation"_a, "seq"_a);

  nb::enum_<Status>(m, "Status", nb::is_arithmetic())
      .value("OK", Status::Ok)
      .value("DEADLINE", Status::Deadline)
      .value("PEER_GONE", Status::PeerGone)
      .value("BAD_HEADER", Status::BadHeader)
      .value("CAPACITY", Status::Capacity)
      .value("CLOSED", Status::Closed);

  nb::class_<Header>(m, "Header")
      .def_ro("layer", &Header::layer)
      .def_ro("micro_batch", &Header::micro_batch)
      .def_ro("rows", &Header::rows)
      .def_ro("depth", &Header::depth)
      .def_ro("kind", &Header::kind)
      .def_ro("dtype", &Header::dtype)
      .def_ro("nbytes", &Header::nbytes)
      .def_ro("step", &Header::step)
      .def_ro("t_posted", &Header::t_posted)
      .def_ro("t_arrived", &Header::t_arrived)
      .def("__repr__", &header_text);

  nb::class_<Region>(m, "Region")
      .def(
          "__init__",
          [](Region* self, uint64_t slots, uint64_t slot_bytes, std::string name,
             std::optional<std::string> tcp_host, uint16_t tcp_port) {
            const nb::gil_scoped_release release;
            new (self) Region(slots, slot_bytes,
                              RegionOptions{std::move(name), tcp_host.value_or(""), tcp_port});
          },
          "slots"_a, "slot_bytes"_a, nb::kw_only(), "name"_a, "tcp_host"_a = nb::none(),
          "tcp_port"_a = 0)
      .def_prop_ro("name", &Region::name)
      .def_prop_ro("slots", &Region::slots)
      .def_prop_ro("slot_bytes", &Region::slot_bytes)
      .def_prop_ro("addresses", &Region::addresses)
      .def_prop_ro("closed", &Region::closed)
      .def("buffer", &buffer, "slot"_a)
      .def(
          "header", [](Region& r, int64_t slot) { return r.header(checked_slot(r, slot)); },
          "slot"_a)
      .def(
          "ready",
          [](Region& r, int64_t slot, uint64_t flag) {
            return r.ready(checked_slot(r, slot), flag);
          },
          "slot"_a, "flag"_a)
      .def(
          "gone", [](Region& r, int64_t slot) { return r.gone(checked_slot(r, slot)); }, "slot"_a)
      .def("wait_all", &wait_all, "slots"_a, "flags"_a, "timeout_us"_a)
      .def("wait_any", &wait_any, "slots"_a, "flags"_a, "timeout_us"_a)
      .def("wake", &Region::wake)
      .def("set_spin_us", &Region::set_spin_us, "us"_a)
      .def("close", &Region::close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Link>(m, "Link")
      .def(nb::new_(&connect), "addresses"_a, nb::kw_only(), "backend"_a = "auto",
           "slots"_a = nb::none(), "timeout_us"_a)
      .def_prop_ro("backend", &Link::backend)
      .def("post", &post, "slot"_a, "flag"_a, "layer"_a, "micro_batch"_a, "rows"_a, "depth"_a,
           "kind"_a, "dtype"_a, "step"_a, "parts"_a)
      .def("close", &Link::close, nb::call_guard<nb::gil_scoped_release>());
}
