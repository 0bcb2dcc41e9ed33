// Options of backend verbs (RDMA).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace afd_comm {

constexpr int kMaxVerbsPorts = 8;
constexpr int kMaxVerbsQps = 16;  // of one link

// Each end of a link has its own options. `host` and `port` apply to a region only.
struct VerbsOptions {
  // Where the region listens for the handshake. That TCP connection stays open as long as the link:
  // its end shows a peer's death, and after a port failed both ends agree over it on what to send
  // again. Choose an address that does not depend on one of `ports`.
  std::string host;
  uint16_t port = 0;  // 0: the kernel chooses
  // "device:port" in rail order: port i of one end talks to port i of the other end.
  std::vector<std::string> ports;
  int qps_per_port = 2;   // connections of a link per pair of ports
  int gid_index = -1;     // -1: the first RoCE v2 address of the port
  int traffic_class = 0;  // RoCE: DSCP << 2; InfiniBand: of the global route
  int service_level = 0;  // InfiniBand SL; RoCE: priority where the NIC maps it
  int timeout = 14;       // acknowledgement timeout, 4.096 us << timeout
  int retry = 6;          // 0 to 6; on some devices 7 means "forever"
  int64_t spin_us = -1;   // polling before sleeping; -1: 50, on at most two usable CPUs 5
  uint64_t stripe_bytes = 64 << 10;  // payloads of twice this and more are striped over the QPs
  std::string library = "libibverbs.so.1";
};

// Throws CommError for a value out of range.
void check_options(const VerbsOptions& options);

// "device" or "device:port".
struct PortName {
  std::string device;
  uint8_t number = 1;
};
// Throws CommError for any other text.
PortName parse_port(const std::string& text);

}  // namespace afd_comm
