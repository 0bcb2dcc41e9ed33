#include "afd_comm/link.h"

#include "backends.h"

namespace afd_comm {
namespace {

#define AFD_COMM_POINTER(name) &name,
constexpr const Backend* kBackends[] = {AFD_COMM_BACKENDS(AFD_COMM_POINTER)};
#undef AFD_COMM_POINTER

bool usable(const Backend& backend, const std::string& scheme, const LinkOptions& options) {
  if (!options.device.is_cpu() && !backend.sends_from_devices) return false;
  if (scheme == backend.name) return true;
  return backend.accepts != nullptr && backend.accepts(scheme, options);
}

}  // namespace

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const Backend* backend : kBackends) names.emplace_back(backend->name);
  return names;
}

std::vector<std::unique_ptr<Receiver>> open_receivers(const Memory& memory, const Token& token,
                                                      const RegionOptions& options) {
  std::vector<std::unique_ptr<Receiver>> receivers;
  for (const Backend* backend : kBackends) {
    if (backend->open_receiver == nullptr) continue;
    if (auto receiver = backend->open_receiver(memory, token, options))
      receivers.push_back(std::move(receiver));
  }
  return receivers;
}

std::unique_ptr<Link> open_link(const std::vector<std::string>& addresses,
                                const LinkOptions& options) {
  std::string known, reasons;
  bool matched = options.backend == "auto";
  for (const Backend* backend : kBackends) {
    known += std::string(known.empty() ? "" : ", ") + backend->name;
    if (options.backend != "auto" && options.backend != backend->name) continue;
    matched = true;
    for (const std::string& address : addresses) {
      if (!usable(*backend, scheme_of(address), options)) continue;
      try {
        return backend->open_link(address, options);
      } catch (const CommError& error) {
        reasons += std::string(reasons.empty() ? "" : "; ") + backend->name + ": " + error.what();
      }
    }
  }
  if (!matched) throw CommError("unknown backend '" + options.backend + "'; use auto, " + known);
  if (reasons.empty()) {
    std::string offered;
    for (const std::string& address : addresses)
      offered += std::string(offered.empty() ? "" : ", ") + scheme_of(address);
    throw CommError("the peer offers no address for backend '" + options.backend +
                    "' (it offers: " + (offered.empty() ? "none" : offered) + ") to a caller on " +
                    device_text(options.device) +
                    "; give its Region a tcp_host or verbs options, or choose a backend it has");
  }
  throw CommError("cannot reach the peer's region: " + reasons);
}

Status Link::enqueue(Stream, const Message&, const uint32_t*) {
  throw CommError("backend " + std::string(backend()) +
                  " has no streams; open the link with device='cuda:N' or 'hip:N', or use post()");
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
