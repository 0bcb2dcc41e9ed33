// Python binding of Link.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "afd_comm/link.h"
#include "python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {

namespace {

Status enqueue(Link& link, uint64_t stream, const Message& unflagged, uint64_t flag,
               uintptr_t count) {
  Message message = unflagged;
  message.flag = flag;
  if (count % alignof(uint32_t) != 0)
    throw nb::value_error("count is the address of an aligned 32-bit word");
  // If the driver's launch queue is full, this call waits for the stream, and so for a peer.
  const nb::gil_scoped_release release;
  return link.enqueue(reinterpret_cast<Stream>(static_cast<uintptr_t>(stream)), message,
                      reinterpret_cast<const uint32_t*>(count));
}

Status post(Link& link, const Message& unflagged, uint64_t flag, const Received* answer_to) {
  Message message = unflagged;
  message.flag = flag;
  message.echo = echo_of(answer_to);
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

// Posts one message to several links. Returns the index and the status of those that failed.
std::vector<std::pair<std::size_t, Status>> post_each(const std::vector<Link*>& links,
                                                      const Message& unflagged, const Slots& slots,
                                                      const Flags& flags) {
  if (slots.shape(0) != links.size() || flags.shape(0) != links.size())
    throw nb::value_error("slots and flags have one entry per link");
  const auto copied = static_cast<uint64_t>(unflagged.header.nbytes) * links.size();
  const bool quick = copied <= kCopyWithGil && std::none_of(links.begin(), links.end(),
                                                            [](auto* l) { return l->may_block(); });
  std::vector<std::pair<std::size_t, Status>> failed;
  {
    std::optional<nb::gil_scoped_release> release;
    if (!quick) release.emplace();
    Message message = unflagged;
    for (std::size_t i = 0; i < links.size(); ++i) {
      message.slot = slots.data()[i];
      message.flag = flags.data()[i];
      const Status status = links[i]->post(message);
      if (status != Status::Ok) failed.emplace_back(i, status);
    }
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return failed;
}

std::unique_ptr<Link> connect(std::vector<std::string> addresses, std::string backend,
                              std::optional<std::pair<uint32_t, uint32_t>> slots,
                              int64_t timeout_us, std::string device, bool trace,
                              int64_t zero_copy_from, uint32_t tcp_connections,
                              std::optional<VerbsOptions> verbs) {
  LinkOptions options;
  options.backend = std::move(backend);
  if (slots) options.slots = SlotRange{slots->first, slots->second};
  if (slots && slots->second == 0)
    throw nb::value_error("slots=(first, count): count must be at least 1");
  options.timeout_us = timeout_us;
  options.device = parse_device(device);
  options.trace = trace;
  options.zero_copy_from = zero_copy_from;
  if (tcp_connections > kMaxTcpConnections)
    throw nb::value_error("tcp_connections must be 0 (by the number of CPUs) to 8");
  options.tcp_connections = tcp_connections;
  options.verbs = std::move(verbs);
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

void register_memory(Link& link, uintptr_t ptr, uint64_t nbytes, const std::string& device) {
  if (ptr == 0 || nbytes == 0) throw nb::value_error("register_memory needs at least one byte");
  const nb::gil_scoped_release release;
  link.register_memory(reinterpret_cast<void*>(ptr), nbytes, parse_device(device));
}

// The Python type Recording.
class PyRecording {
 public:
  explicit PyRecording(std::unique_ptr<Recording> recording) : recording_(std::move(recording)) {}
  void release() { recording_.reset(); }

 private:
  std::unique_ptr<Recording> recording_;
};

Status wait_sent(Link& link, uint32_t slot, int64_t timeout_us) {
  Status status;
  {
    const nb::gil_scoped_release release;
    status = link.wait_sent(slot, timeout_us);
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return status;
}

}  // namespace

void bind_link(nb::module_& m) {
  m.def("backends", [] {
    nb::list names;
    for (const std::string& name : backend_names()) names.append(name);
    return nb::tuple(names);
  });
  m.def("post_each", &post_each, "links"_a, "message"_a, "slots"_a, "flags"_a);
  nb::class_<PyRecording>(m, "Recording").def("release", &PyRecording::release);
  nb::class_<Link>(m, "Link")
      .def(nb::new_(&connect), "addresses"_a, nb::kw_only(), "backend"_a = "auto",
           "slots"_a = nb::none(), "timeout_us"_a, "device"_a = "cpu", "trace"_a = false,
           "zero_copy_from"_a = -1, "tcp_connections"_a = 0, "verbs"_a = nb::none())
      .def_prop_rw("trace", &Link::traced, &Link::set_trace)
      .def_prop_ro("backend", &Link::backend)
      .def_prop_ro("notes", &Link::notes)
      .def_prop_ro("sends_alone", &Link::sends_alone)
      .def("register_memory", &register_memory, "ptr"_a, "nbytes"_a, "device"_a = "cpu")
      .def("wait_sent", &wait_sent, "slot"_a, "timeout_us"_a)
      .def("post", &post, "message"_a, "flag"_a, "answer_to"_a = nb::none())
      .def("enqueue", &enqueue, "stream"_a, "message"_a, "flag"_a, "count"_a = 0)
      .def("record", [](Link& link) { return std::make_unique<PyRecording>(link.record()); })
      .def_prop_ro("status", &Link::status)
      .def("close", &Link::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace afd_comm
