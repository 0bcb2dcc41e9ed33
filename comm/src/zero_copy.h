// Backend tcp: sending registered memory without a copy into the kernel (MSG_ZEROCOPY).
//
// The kernel numbers such sends from 0 and reports completed ones on the socket's error queue
// (Linux Documentation/networking/msg_zerocopy.rst).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace afd_comm {

class ZeroCopy {
 public:
  // Parts of at least `least` bytes are worth it; the kernel's own advice is 10 KB, see README.
  explicit ZeroCopy(uint64_t least) : least_(least) {}

  // Adds memory to send from. The first call enables zero copy; if the kernel refuses, everything
  // is copied.
  void allow(int fd, const void* address, uint64_t nbytes);
  // Whether these bytes should be sent without a copy.
  bool wants(const void* data, uint64_t nbytes) const;

  // Records one successful send with MSG_ZEROCOPY. Returns the number of such sends so far: its
  // mark.
  uint64_t sent() { return ++sent_; }
  // Reads the socket's error queue. Never blocks.
  void reap(int fd);
  // Whether the kernel has completed all sends up to that mark.
  bool done(uint64_t mark) const { return done_ >= mark; }
  // Whether the kernel reported that it copied anyway, as on loopback.
  bool copied() const { return copied_; }

 private:
  void complete(uint64_t first, uint64_t last);
  struct Range {
    const uint8_t* begin;
    uint64_t nbytes;
  };
  uint64_t least_;
  bool enabled_ = false;
  bool copied_ = false;
  std::vector<Range> allowed_;
  uint64_t sent_ = 0;
  uint64_t done_ = 0;                                 // sends 0 to done_ - 1 are complete
  std::vector<std::pair<uint64_t, uint64_t>> early_;  // later sends that are complete
};

}  // namespace afd_comm
