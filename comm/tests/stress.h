// Helpers shared by the parts of the stress program.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "afd_comm/link.h"
#include "afd_comm/process.h"
#include "afd_comm/region.h"

namespace afd_comm {

constexpr int64_t kTimeoutUs = 10000000;
constexpr uint64_t kSlotBytes = 100000;

inline void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "stress: failed: %s\n", what);
  _exit(1);
}

// `connections`: of backend tcp; with several, messages are cut into small stripes.
inline std::unique_ptr<Link> connect(const Region& region, const char* backend, SlotRange slots,
                                     uint32_t connections = 1) {
  LinkOptions options;
  options.tcp_connections = connections;
  options.tcp_stripe_bytes = 4096;
  options.backend = backend;
  options.slots = slots;
  options.timeout_us = kTimeoutUs;
  options.trace = true;
  return open_link(region.addresses(), options);
}

inline Status post(Link& link, uint32_t slot, uint64_t flag, const std::vector<uint8_t>& data) {
  Message message;
  message.slot = slot;
  message.flag = flag;
  message.header.nbytes = static_cast<int64_t>(data.size());
  message.parts[0] = Part{0, data.data(), data.size() / 2};
  message.parts[1] =
      Part{data.size() / 2, data.data() + data.size() / 2, data.size() - data.size() / 2};
  message.part_count = 2;
  return link.post(message);
}

inline Status await(Region& region, uint32_t slot, uint64_t flag, int64_t timeout_us) {
  Awaited awaited{slot, flag, Status::Deadline};
  region.wait(&awaited, 1, WaitFor::All, deadline_after_us(timeout_us), nullptr);
  return awaited.status;
}

// Each kills `rounds` processes at random moments (stress_kill.cc).
void killed_sender(const char* backend, int rounds);
void killed_receiver(const char* backend, int rounds);

}  // namespace afd_comm
