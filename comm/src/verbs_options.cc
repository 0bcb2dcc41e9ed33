#include <charconv>

#include "afd_comm/types.h"
#include "afd_comm/verbs.h"

namespace afd_comm {
namespace {

void in_range(const char* name, int64_t value, int64_t low, int64_t high, const char* why) {
  if (value >= low && value <= high) return;
  throw CommError(std::string("verbs: ") + name + " is " + std::to_string(value) +
                  "; it must be from " + std::to_string(low) + " to " + std::to_string(high) + why);
}

}  // namespace

PortName parse_port(const std::string& text) {
  PortName out;
  const std::size_t colon = text.find(':');
  out.device = text.substr(0, colon);
  unsigned number = 1;
  bool good = !out.device.empty() && out.device.find('/') == std::string::npos;
  if (colon != std::string::npos) {
    const char* end = text.data() + text.size();
    const auto result = std::from_chars(text.data() + colon + 1, end, number);
    good = good && result.ec == std::errc() && result.ptr == end && number >= 1 && number <= 255;
  }
  if (!good)
    throw CommError("verbs: '" + text +
                    "' is not a port; write device or device:port, such as mlx5_0:1");
  out.number = static_cast<uint8_t>(number);
  return out;
}

void check_options(const VerbsOptions& o) {
  in_range("the number of ports", static_cast<int64_t>(o.ports.size()), 1, kMaxVerbsPorts,
           "; name them, such as mlx5_0:1 (`afd doctor` lists this host's)");
  in_range("qps_per_port", o.qps_per_port, 1, kMaxVerbsQps, "");
  in_range("gid_index", o.gid_index, -1, 255, "; -1 chooses the first RoCE v2 address");
  in_range("traffic_class", o.traffic_class, 0, 255, "; RoCE: DSCP times 4");
  in_range("service_level", o.service_level, 0, 15, "");
  in_range("timeout", o.timeout, 1, 31, "; it means 4.096 us << timeout, 0 would wait forever");
  in_range("retry", o.retry, 0, 6,
           "; 7 means forever on some devices, and a dead peer would never be noticed");
  in_range("spin_us", o.spin_us, -1, 1000000000, "");
  in_range("stripe_bytes", static_cast<int64_t>(o.stripe_bytes), 64, int64_t{1} << 40, "");
  for (const std::string& port : o.ports) parse_port(port);
}

}  // namespace afd_comm
