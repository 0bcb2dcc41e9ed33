// Python binding: the module, and what belongs to no class.
#include "python.h"

NB_MODULE(_core, m) {
  namespace nb = nanobind;
  using namespace nb::literals;
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

  bind_message(m);
  bind_trace(m);
  bind_verbs(m);
  bind_region(m);
  bind_link(m);
  bind_group(m);
  bind_step_gate(m);
  bind_bench(m);
}
