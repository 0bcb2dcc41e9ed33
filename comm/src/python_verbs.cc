// Python binding of backend verbs' options.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "afd_comm/verbs.h"
#include "python.h"
#include "verbs_plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

// `plan`: plan_stripes or plan_staged.
template <auto plan, typename... Rule>
std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> planned(uint64_t nbytes, uint32_t alive,
                                                              uint32_t turn, Rule... rule) {
  if (alive == 0 || alive > all_stripes(kMaxStripes))
    throw nb::value_error("alive must name at least one of 16 queue pairs");
  const StripePlan stripes = plan(nbytes, alive, turn, rule...);
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> out;
  for (uint32_t i = 0; i < stripes.count; ++i) {
    const Stripe& s = stripes.stripes[i];
    out.emplace_back(s.qp, s.begin, s.end - s.begin);
  }
  return out;
}

}  // namespace

void bind_verbs(nb::module_& m) {
  nb::class_<VerbsOptions>(m, "VerbsOptions")
      .def(
          "__init__",
          [](VerbsOptions* self, std::vector<std::string> ports, std::string host, uint16_t port,
             int qps_per_port, int gid_index, int traffic_class, int service_level, int timeout,
             int retry, int64_t spin_us, uint64_t stripe_bytes, std::string library) {
            VerbsOptions options;
            options.ports = std::move(ports);
            options.host = std::move(host);
            options.port = port;
            options.qps_per_port = qps_per_port;
            options.gid_index = gid_index;
            options.traffic_class = traffic_class;
            options.service_level = service_level;
            options.timeout = timeout;
            options.retry = retry;
            options.spin_us = spin_us;
            options.stripe_bytes = stripe_bytes;
            options.library = std::move(library);
            check_options(options);
            new (self) VerbsOptions(std::move(options));
          },
          nb::kw_only(), "ports"_a, "host"_a = "", "port"_a = 0, "qps_per_port"_a = 2,
          "gid_index"_a = -1, "traffic_class"_a = 0, "service_level"_a = 0, "timeout"_a = 14,
          "retry"_a = 6, "spin_us"_a = -1, "stripe_bytes"_a = 64 << 10,
          "library"_a = "libibverbs.so.1");
  m.def("plan_stripes", &planned<plan_stripes, uint64_t>, "nbytes"_a, "alive"_a, "turn"_a,
        "least"_a);
  m.def("plan_staged", &planned<plan_staged>, "nbytes"_a, "alive"_a, "turn"_a);
  m.def("stripe_length", &stripe_length, "nbytes"_a, "count"_a, "unit"_a);
}

}  // namespace afd_comm
