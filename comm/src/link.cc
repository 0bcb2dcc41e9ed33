#include "afd_comm/link.h"

#include "backends.h"

namespace afd_comm {
namespace {

struct Backend {
  const char* name;  // also the scheme of its addresses
  std::unique_ptr<Link> (*open)(const std::string& address, const LinkOptions& options);
};

// In order of preference. A new backend is one file and one line here.
constexpr Backend kBackends[] = {
    {"shm", open_shm_link},
    {"verbs", open_verbs_link},
    {"tcp", open_tcp_link},
};

}  // namespace

std::unique_ptr<Link> open_link(const std::vector<std::string>& addresses,
                                const LinkOptions& options) {
  std::string known, reasons;
  bool matched = options.backend == "auto";
  for (const Backend& backend : kBackends) {
    known += std::string(known.empty() ? "" : ", ") + backend.name;
    if (options.backend != "auto" && options.backend != backend.name) continue;
    matched = true;
    for (const std::string& address : addresses) {
      if (scheme_of(address) != backend.name) continue;
      try {
        return backend.open(address, options);
      } catch (const CommError& error) {
        reasons += std::string(reasons.empty() ? "" : "; ") + backend.name + ": " + error.what();
      }
    }
  }
  if (!matched) throw CommError("unknown backend '" + options.backend + "'; use auto, " + known);
  if (reasons.empty()) {
    std::string offered;
    for (const std::string& address : addresses)
      offered += std::string(offered.empty() ? "" : ", ") + scheme_of(address);
    throw CommError("the peer offers no address for backend '" + options.backend +
                    "' (it offers: " + (offered.empty() ? "none" : offered) +
                    "); give its Region a tcp_host or verbs options, or choose a backend it has");
  }
  throw CommError("cannot reach the peer's region: " + reasons);
}

Times times_of(const Message& m, uint64_t posted) {
  Times times;
  times.posted = static_cast<int64_t>(posted);
  times.echo_posted = m.echo.posted;
  times.echo_arrived = m.echo.arrived;
  times.clock = clock_identity();
  return times;
}

Status check_message(const Message& m, uint32_t slots, uint64_t slot_bytes, SlotRange claimed) {
  if (m.slot >= slots || m.flag == 0 || m.part_count > kMaxParts) return Status::BadHeader;
  if (claimed.count != 0 && !claimed.contains(m.slot)) return Status::BadHeader;
  for (std::size_t i = 0; i < m.part_count; ++i) {
    const Part& part = m.parts[i];
    if (part.offset > slot_bytes || part.nbytes > slot_bytes - part.offset) return Status::Capacity;
  }
  return Status::Ok;
}

}  // namespace afd_comm
