// Base of links that map the receiver's region: the claim, and checks that receiver and claim are
// alive.
#pragma once

#include <atomic>

#include "afd_comm/claims.h"
#include "backends.h"

namespace afd_comm {

class MappedLink : public Link {
 public:
  // Claims options.slots. Throws CommError.
  MappedLink(Memory memory, const LinkOptions& options);
  ~MappedLink() override { close(); }
  void close() override;

 protected:
  // Returns Ok, or why the message must not be written. `now`: now_ns() if the caller has it, else
  // 0.
  Status check(const Message& message, uint64_t now = 0);
  // Writes the header and, with `trace`, the times.
  void describe(SlotControl& control, const Message& message, bool trace, uint64_t posted,
                uint64_t arrived) const;
  // A newer writer may come at any time; its doorbell must not be overwritten.
  bool owns(uint32_t slot) const {
    return slots_.count == 0 || holds_claim(memory_, slot, serial_);
  }

  Memory memory_;

 private:
  bool receiver_alive(uint64_t now);

  SlotRange slots_;
  uint64_t serial_ = 0;
  pid_t creator_;
  bool same_clock_;  // as the receiver's
  ProcessWatch receiver_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> receiver_ended_{false};
  std::atomic<uint64_t> last_look_{0};
};

}  // namespace afd_comm
