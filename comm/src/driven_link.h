// What a link that the CPU drives (tcp, verbs) offers to its proxy (proxy_link.h).
#pragma once

#include <atomic>
#include <memory>

#include "afd_comm/link.h"
#include "poller.h"

namespace afd_comm {

// How many bytes of a message's parts, laid end to end, may be read by now. It may grow.
using Available = std::atomic<uint64_t>;

struct Limits {
  uint32_t slots = 0;  // of the region
  uint64_t slot_bytes = 0;
  SlotRange claimed;
};

class DrivenLink : public Link {
 public:
  using Link::Link;

  enum class Start {
    Refused,  // not now: the slot's last message is on its way, or another thread sends
    Begun,    // go_on() continues it
    Done,     // `outcome` is set
  };
  // Like begin(), but waits for nothing, not even for another thread's post. `available`: null if
  // all bytes may be read. It must live until the message is done. Parts are host memory, or
  // registered.
  virtual Start start(const Message& message, const Available* available, Status& outcome) = 0;
  // Continues a message that was begun. Returns its outcome, or nothing if it must be called again.
  virtual std::optional<Status> go_on(uint32_t slot) = 0;
  // Gives up a message that was begun. Returns the outcome.
  virtual Status give_up(uint32_t slot) = 0;

  virtual Limits limits() const = 0;
  // Whether the slot's last message has left its memory. Thread safe.
  virtual bool sent(uint32_t /*slot*/) const { return true; }
  // Ok, or why no message can be sent any more. Thread safe.
  virtual Status health() const = 0;
  // Whether it can send from device memory at all.
  virtual bool reads_devices() const { return false; }
  // Makes sure that this memory of a device can be sent in place. Returns false if it cannot, and
  // must be copied to the host first. May take milliseconds the first time.
  virtual bool adopt(const void* /*data*/, uint64_t /*nbytes*/, Device) { return false; }
  // The thread that sends for this link.
  virtual std::shared_ptr<Poller> poller() const { return Poller::shared(); }
};

}  // namespace afd_comm
