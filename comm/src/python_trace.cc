// Python binding of the trace.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>

#include "afd_comm/trace.h"
#include "python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

// The Python type Histogram: a copy of the counts at one moment.
struct Snapshot {
  explicit Snapshot(const Histogram& h)
      : counts(h.counts()), total_ns(h.total_ns()), max_ns(h.max_ns()) {
    for (const uint64_t n : counts) count += n;
  }

  // Returns the middle of the bucket below which `fraction` of the counts lie.
  uint64_t quantile(double fraction) const {
    if (!(fraction >= 0.0 && fraction <= 1.0)) throw nb::value_error("fraction is not in [0, 1]");
    if (count == 0) return 0;
    const double wanted = fraction * static_cast<double>(count);
    uint64_t seen = 0, lower = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      seen += counts[i];
      const uint64_t upper = Histogram::upper_bound(i);
      if (counts[i] != 0 && static_cast<double>(seen) >= wanted)
        return std::min((lower + upper) / 2, max_ns);
      lower = upper;
    }
    return max_ns;
  }

  // Returns, for each bound, the counts in buckets that end at or below it. Bounds must not
  // decrease.
  std::vector<uint64_t> cumulative(const std::vector<uint64_t>& bounds) const {
    std::vector<uint64_t> out;
    uint64_t seen = 0;
    std::size_t i = 0;
    for (const uint64_t bound : bounds) {
      // The last bucket has no upper end.
      while (i + 1 < counts.size() && Histogram::upper_bound(i) <= bound + 1) seen += counts[i++];
      out.push_back(seen);
    }
    return out;
  }

  Histogram::Counts counts;
  uint64_t total_ns;
  uint64_t max_ns;
  uint64_t count = 0;
};

nb::list events(PeerTrace& trace) {
  nb::list out;
  for (const TraceEvent& e : trace.events())
    out.append(nb::make_tuple(e.posted, e.sent, e.arrived, e.consumed, user_bytes(e.user), e.count,
                              e.nbytes));
  return out;
}

}  // namespace

void bind_trace(nb::module_& m) {
  nb::class_<Snapshot>(m, "Histogram")
      .def_ro("count", &Snapshot::count)
      .def_ro("total_ns", &Snapshot::total_ns)
      .def_ro("max_ns", &Snapshot::max_ns)
      .def("quantile_ns", &Snapshot::quantile, "fraction"_a)
      .def("cumulative", &Snapshot::cumulative, "bounds_ns"_a);

  const auto taken = [](Path path) {
    return [path](PeerTrace& trace) { return Snapshot(trace.histogram(path)); };
  };
  nb::class_<PeerTrace>(m, "PeerTrace")
      .def(nb::init<>())
      .def_prop_ro("inbound", taken(Path::Inbound))
      .def_prop_ro("outbound", taken(Path::Outbound))
      .def_prop_ro("round_trip", taken(Path::RoundTrip))
      .def_prop_ro("waiting", taken(Path::Waiting))
      .def("events", &events)
      .def_prop_ro("offset_ns", [](PeerTrace& trace) { return trace.offset().ns; })
      .def_prop_ro("offset_error_ns", [](PeerTrace& trace) { return trace.offset().error_ns; });
}

}  // namespace afd_comm
