// Options of backend verbs (RDMA).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace afd_comm {

constexpr int kMaxVerbsPorts = 8;
constexpr int kMaxVerbsQps = 16;  // of one link

// Both ends of a link have their own. `host` and `port` matter to a region only.
struct VerbsOptions {
  // Where the region listens for the handshake, which stays open for as long as the link: it tells
  // of a peer's death and agrees on what is sent again after a port failed. An address that lives
  // on one of `ports` dies with it.
  std::string host;
  uint16_t port = 0;  // 0: the kernel chooses
  // "device:port" in rail order: the i-th port of one end talks to the i-th of the other.
  std::vector<std::string> ports;
  int qps_per_port = 2;   // connections of a link per pair of ports
  int gid_index = -1;     // -1: the first RoCE v2 address of the port
  int traffic_class = 0;  // RoCE: DSCP << 2; InfiniBand: of the global route
  int service_level = 0;  // InfiniBand SL; RoCE: priority where the NIC maps it
  int timeout = 14;       // acknowledgement timeout, 4.096 us << timeout
  int retry = 6;          // 0 to 6; 7 would mean "for ever" on some devices
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
// Throws CommError when the text is neither.
PortName parse_port(const std::string& text);

}  // namespace afd_comm
