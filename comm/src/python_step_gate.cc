// Python binding of StepGate and StepPlan.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "afd_comm/step_gate.h"
#include "python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

using PerPeer = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PerLane = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Stream as_stream(uint64_t stream) {
  return reinterpret_cast<Stream>(static_cast<uintptr_t>(stream));
}

std::shared_ptr<StepPlan> plan(const std::vector<std::pair<uint32_t, const Message*>>& positions,
                               uint32_t lanes, uint32_t stride) {
  std::vector<StepPlan::Position> copied;
  copied.reserve(positions.size());
  for (const auto& [lane, answer] : positions) copied.push_back({lane, *answer});
  return std::make_shared<StepPlan>(std::move(copied), lanes, stride);
}

// The Python type StepGate: the gate, and the links it keeps alive.
class PyGate {
 public:
  PyGate(Region& region, uint32_t peers, uint32_t lanes)
      : links_(peers), gate_(region, peers, lanes) {}

  void set_peer(uint32_t peer, nb::object link, uint32_t first_slot, uint64_t first_flag) {
    check_peer(peer);
    gate_.set_peer(peer, nb::cast<Link*>(link), first_slot, first_flag);
    links_[peer] = std::move(link);
  }

  void clear_peer(uint32_t peer) {
    check_peer(peer);
    gate_.set_peer(peer, nullptr, 0, 0);
    links_[peer].reset();
  }

  void enqueue_wait(uint64_t stream, uint32_t lane, uint32_t number) {
    check_lane(lane);
    // On device cpu, and if the driver's launch queue is full, this call waits for a peer.
    const nb::gil_scoped_release release;
    gate_.enqueue_wait(as_stream(stream), lane, number);
  }

  void enqueue_ticket(uint64_t stream, uint32_t lane, uint32_t number) {
    check_lane(lane);
    const nb::gil_scoped_release release;
    gate_.enqueue_ticket(as_stream(stream), lane, number);
  }

  void begin(std::shared_ptr<StepPlan> plan, PerPeer depths, PerLane counts, int64_t late_us,
             std::optional<PerLane> firsts) {
    if (depths.shape(0) != gate_.peers() || counts.shape(0) != gate_.peers() ||
        counts.shape(1) != gate_.lanes())
      throw nb::value_error("depths must be int32 [peers] and counts int32 [peers, lanes]");
    if (firsts && (firsts->shape(0) != counts.shape(0) || firsts->shape(1) != counts.shape(1)))
      throw nb::value_error("firsts must have the shape of counts");
    gate_.begin(std::move(plan), depths.data(), counts.data(), late_us,
                firsts ? firsts->data() : nullptr);
  }

  // Returns the status of each peer that did not keep up: making an object for each of dozens that
  // did would take longer than the wait.
  nb::dict wait(uint64_t stream) {
    const Interrupt on_signal = interrupt();
    bool interrupted = false;
    {
      const nb::gil_scoped_release release;
      interrupted = gate_.wait(as_stream(stream), on_signal);
    }
    if (interrupted) throw nb::python_error();
    nb::dict out;
    const std::vector<Status>& statuses = gate_.statuses();
    for (std::size_t i = 0; i < statuses.size(); ++i)
      if (statuses[i] != Status::Ok) out[nb::int_(i)] = nb::cast(statuses[i]);
    return out;
  }

  void cancel() { gate_.cancel(); }

 private:
  void check_peer(uint32_t peer) const {
    if (peer >= gate_.peers()) throw nb::index_error("the gate has fewer peers");
  }
  void check_lane(uint32_t lane) const {
    if (lane >= gate_.lanes()) throw nb::index_error("the gate has fewer lanes");
  }

  std::vector<nb::object> links_;
  StepGate gate_;  // ends before the links
};

}  // namespace

void bind_step_gate(nb::module_& m) {
  nb::class_<StepPlan>(m, "StepPlan")
      .def(nb::new_(&plan), "positions"_a, nb::kw_only(), "lanes"_a, "stride"_a)
      .def("__len__", &StepPlan::size);
  nb::class_<PyGate>(m, "StepGate")
      .def(nb::init<Region&, uint32_t, uint32_t>(), "region"_a, nb::kw_only(), "peers"_a, "lanes"_a,
           nb::keep_alive<1, 2>())
      .def("set_peer", &PyGate::set_peer, "peer"_a, "link"_a, nb::kw_only(), "first_slot"_a,
           "first_flag"_a)
      .def("clear_peer", &PyGate::clear_peer, "peer"_a)
      .def("enqueue_wait", &PyGate::enqueue_wait, "stream"_a, "lane"_a, "number"_a)
      .def("enqueue_ticket", &PyGate::enqueue_ticket, "stream"_a, "lane"_a, "number"_a)
      .def("begin", &PyGate::begin, "plan"_a, "depths"_a, "counts"_a, "late_us"_a,
           "firsts"_a = nb::none())
      .def("wait", &PyGate::wait, "stream"_a)
      .def("cancel", &PyGate::cancel, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace afd_comm
