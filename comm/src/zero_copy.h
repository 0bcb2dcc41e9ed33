// Backend tcp: sending registered memory without a copy into the kernel (MSG_ZEROCOPY).
//
// The kernel numbers such sends from 0 and says on the socket's error queue which of them it is
// done with (Linux Documentation/networking/msg_zerocopy.rst).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace afd_comm {

class ZeroCopy {
 public:
  // Parts of at least `least` bytes are worth it; the kernel's own advice is 10 KB, see README.
  explicit ZeroCopy(uint64_t least) : least_(least) {}

  // Adds memory to send from. The first call asks the kernel; where it refuses, all is copied.
  void allow(int fd, const void* address, uint64_t nbytes);
  // Whether these bytes should be sent from where they lie.
  bool wants(const void* data, uint64_t nbytes) const;

  // One send with MSG_ZEROCOPY succeeded. Returns how many have by now: its mark.
  uint64_t sent() { return ++sent_; }
  // Takes what the error queue has. Never blocks.
  void reap(int fd);
  // Whether the kernel is done with all sends up to that mark.
  bool done(uint64_t mark) const { return done_ >= mark; }
  // Whether the kernel has said that it copied after all, as it does on loopback.
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
  uint64_t done_ = 0;                                 // sends 0 to done_ - 1 are
  std::vector<std::pair<uint64_t, uint64_t>> early_;  // later ones that are done, too
};

}  // namespace afd_comm
