// Python binding of Region and Header.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "afd_comm/guard.h"
#include "afd_comm/hold.h"
#include "python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

uint32_t checked_slot(const Region& region, int64_t slot) {
  if (slot < 0 || slot >= int64_t{region.slots()})
    throw nb::index_error(("slot " + std::to_string(slot) + " is outside of region '" +
                           region.name() + "', which has " + std::to_string(region.slots()) +
                           " slots")
                              .c_str());
  return static_cast<uint32_t>(slot);
}

// The (slot, flag) pairs of a wait; a small number needs no allocation.
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

using Headers = nb::ndarray<uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
constexpr std::size_t kHeaderFields = kUserWords + 3;

// For many slots at once: the arrays are built faster than lists, and nothing is allocated.
int64_t wait_any_of(Region& region, Slots slots, Flags flags, int64_t timeout_us) {
  if (flags.shape(0) != slots.shape(0))
    throw nb::value_error("slots and flags must have the same length");
  std::vector<Awaited> awaited(slots.shape(0));
  for (std::size_t i = 0; i < awaited.size(); ++i)
    awaited[i] = {checked_slot(region, slots.data()[i]), flags.data()[i]};
  const Interrupt on_signal = interrupt();
  bool interrupted = false;
  if (!region.poll(awaited.data(), awaited.size(), WaitFor::Any)) {
    const nb::gil_scoped_release release;
    interrupted = region.wait(awaited.data(), awaited.size(), WaitFor::Any,
                              deadline_after_us(timeout_us), on_signal);
  }
  if (interrupted) throw nb::python_error();
  for (std::size_t i = 0; i < awaited.size(); ++i)
    if (awaited[i].status == Status::Ok) return static_cast<int64_t>(i);
  return -1;
}

std::size_t read_headers(Region& region, Slots slots, Flags flags, std::size_t ahead,
                         Headers into) {
  const std::size_t count = slots.shape(0);
  if (flags.shape(0) != count || into.shape(0) != count || into.shape(1) != kHeaderFields)
    throw nb::value_error("read_headers needs one flag and one row of 6 words per slot");
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const uint32_t slot = checked_slot(region, slots.data()[i]);
    uint64_t* const row = into.data() + i * kHeaderFields;
    row[0] = 0;
    for (uint64_t n = 0; n < ahead; ++n) {
      const uint64_t flag = flags.data()[i] + n;
      if (!region.ready(slot, flag)) continue;
      const Header header = region.header(slot);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (!region.ready(slot, flag)) break;  // overwritten while it was read
      row[0] = n + 1;
      std::copy(header.user.begin(), header.user.end(), row + 1);
      row[kUserWords + 1] = header.count;
      row[kUserWords + 2] = static_cast<uint64_t>(header.nbytes);
      ++found;
      break;
    }
  }
  return found;
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig> buffer(Region& region, int64_t slot) {
  const uint32_t index = checked_slot(region, slot);
  if (!region.device().is_cpu())
    throw CommError("the slots of region '" + region.name() + "' are on " +
                    device_text(region.device()) + "; use view() and from_dlpack");
  // The array keeps the Region object, and with it the mapping, alive.
  return {region.payload(index), {static_cast<std::size_t>(region.slot_bytes())}, nb::find(region)};
}

using DeviceArray = nb::ndarray<nb::array_api, uint8_t, nb::ndim<2>, nb::c_contig>;

DeviceArray view(Region& region, int64_t slot, std::size_t count) {
  const uint32_t index = checked_slot(region, slot);
  if (count == 0 || index % region.payloads() + count > region.payloads())
    throw nb::index_error(("the " + std::to_string(count) + " payloads from slot " +
                           std::to_string(slot) + " exceed region '" + region.name() +
                           "', which has " + std::to_string(region.payloads()) + " payloads")
                              .c_str());
  const bool on_host = region.device().is_cpu();
  return DeviceArray(region.payload(index), {count, static_cast<std::size_t>(region.slot_stride())},
                     nb::find(region), {}, nb::dtype<uint8_t>(),
                     on_host ? nb::device::cpu::value : region.accelerator().dlpack_type(),
                     region.device().index);
}

Stream as_stream(uint64_t stream) {
  return reinterpret_cast<Stream>(static_cast<uintptr_t>(stream));
}

void enqueue_wait(Region& region, uint64_t stream, nb::list slots, nb::list flags, bool reset) {
  AwaitedList awaited(region, slots, flags);
  // If the driver's launch queue is full, this call waits for the stream, and so for a peer.
  const nb::gil_scoped_release release;
  region.enqueue_wait(as_stream(stream), awaited.data(), awaited.size(), reset);
}

std::unique_ptr<Guard> guard(Region& region, uint64_t stream, nb::list slots, nb::list flags,
                             Hold* hold) {
  AwaitedList awaited(region, slots, flags);
  return std::make_unique<Guard>(
      region, as_stream(stream),
      std::vector<Awaited>(awaited.data(), awaited.data() + awaited.size()), hold);
}

nb::list wait_guard(Guard& guard, int64_t timeout_us) {
  const Interrupt on_signal = interrupt();
  bool interrupted = false;
  {
    const nb::gil_scoped_release release;
    interrupted = guard.wait(deadline_after_us(timeout_us), on_signal);
  }
  if (interrupted) throw nb::python_error();
  nb::list out;
  for (const Awaited& awaited : guard.awaited()) out.append(nb::cast(awaited.status));
  return out;
}

std::string header_text(const Received& r) {
  const auto field = [](const char* name, int64_t value) {
    return std::string(name) + "=" + std::to_string(value);
  };
  const Header& h = r.header;
  return "Header(user=" + user_text(h.user) + ", " + field("count", h.count) + ", " +
         field("nbytes", h.nbytes) + ", " + field("t_posted", r.times.posted) + ", " +
         field("t_arrived", r.times.arrived) + ")";
}

Received received(Region& region, int64_t slot) {
  const uint32_t index = checked_slot(region, slot);
  return {region.header(index), region.times(index)};
}

void trace(Region& region, std::pair<uint32_t, uint32_t> slots, std::shared_ptr<PeerTrace> into) {
  region.trace(SlotRange{slots.first, slots.second}, std::move(into));
}

template <auto Group, auto Field>
auto field(const Received& received) {
  return received.*Group.*Field;
}

}  // namespace

void bind_region(nb::module_& m) {
  nb::class_<Received>(m, "Header")
      .def_prop_ro("user",
                   [](const Received& received) { return user_bytes(received.header.user); })
      .def_prop_ro("count", &field<&Received::header, &Header::count>)
      .def_prop_ro("nbytes", &field<&Received::header, &Header::nbytes>)
      .def_prop_ro("t_posted", &field<&Received::times, &Times::posted>)
      .def_prop_ro("t_sent", &field<&Received::times, &Times::sent>)
      .def_prop_ro("t_arrived", &field<&Received::times, &Times::arrived>)
      .def_prop_ro("t_consumed", &field<&Received::times, &Times::consumed>)
      .def("__repr__", &header_text);

  nb::class_<Hold>(m, "Hold")
      .def(
          "__init__",
          [](Hold* self, const std::string& device) { new (self) Hold(parse_device(device)); },
          "device"_a)
      .def("open", &Hold::open)
      .def_prop_ro("closed", &Hold::closed);

  nb::class_<Guard>(m, "Guard")
      .def_prop_ro("done", &Guard::done)
      .def("wait", &wait_guard, "timeout_us"_a);

  nb::class_<Region>(m, "Region")
      .def(
          "__init__",
          [](Region* self, uint64_t slots, uint64_t slot_bytes, std::string name,
             std::optional<std::string> tcp_host, uint16_t tcp_port,
             std::optional<VerbsOptions> verbs, std::optional<uint64_t> payloads,
             std::string device) {
            const nb::gil_scoped_release release;
            new (self) Region(
                slots, slot_bytes,
                RegionOptions{std::move(name), tcp_host.value_or(""), tcp_port, std::move(verbs),
                              payloads.value_or(slots), parse_device(device)});
          },
          "slots"_a, "slot_bytes"_a, nb::kw_only(), "name"_a, "tcp_host"_a = nb::none(),
          "tcp_port"_a = 0, "verbs"_a = nb::none(), "payloads"_a = nb::none(), "device"_a = "cpu")
      .def_prop_ro("name", &Region::name)
      .def_prop_ro("slots", &Region::slots)
      .def_prop_ro("slot_bytes", &Region::slot_bytes)
      .def_prop_ro("addresses", &Region::addresses)
      .def_prop_ro("closed", &Region::closed)
      .def_prop_ro("payloads", &Region::payloads)
      .def_prop_ro("slot_stride", &Region::slot_stride)
      .def_prop_ro("device", [](const Region& r) { return device_text(r.device()); })
      .def("buffer", &buffer, "slot"_a)
      .def("view", &view, "slot"_a, "count"_a = 1)
      .def("header", &received, "slot"_a)
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
      .def("wait_any_of", &wait_any_of, "slots"_a, "flags"_a, "timeout_us"_a)
      .def("read_headers", &read_headers, "slots"_a, "flags"_a, "ahead"_a, "into"_a)
      .def(
          "pin", [](Region& r, const std::string& device) { r.pin(parse_device(device)); },
          "device"_a)
      .def(
          "reset",
          [](Region& r, nb::list slots) {
            for (const nb::handle slot : slots)
              r.set_doorbell(checked_slot(r, nb::cast<int64_t>(slot)), 0);
          },
          "slots"_a)
      .def(
          "ring",
          [](Region& r, nb::list slots, nb::list flags) {
            AwaitedList rung(r, slots, flags);
            for (std::size_t i = 0; i < rung.size(); ++i)
              r.set_doorbell(rung.data()[i].slot, rung.data()[i].flag);
          },
          "slots"_a, "flags"_a)
      .def("enqueue_wait", &enqueue_wait, "stream"_a, "slots"_a, "flags"_a, "reset"_a = false)
      .def("guard", &guard, "stream"_a, "slots"_a, "flags"_a, "hold"_a = nb::none(),
           nb::keep_alive<0, 1>(), nb::keep_alive<0, 5>())
      .def("trace", &trace, "slots"_a, "into"_a.none())
      .def("wake", &Region::wake)
      .def_prop_ro("nics_write_alone",
                   [](Region& r) {
                     if (r.device().is_cpu()) return true;
                     const RemoteWrites writes = r.accelerator().remote_writes();
                     // HIP flushes by a register, CUDA by a call of the driver.
                     return writes == RemoteWrites::Ordered ||
                            (writes == RemoteWrites::Flushed && r.device().kind == DeviceKind::Hip);
                   })
      .def("set_spin_us", &Region::set_spin_us, "us"_a)
      .def("close", &Region::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace afd_comm
