// Interface of a backend's receiving side: something that writes into the region on behalf of
// remote peers. (shm has none: its peers write by themselves.)
#pragma once

#include <cstdint>
#include <string>

namespace afd_comm {

class Receiver {
 public:
  virtual ~Receiver() = default;
  // What a peer needs to connect.
  virtual std::string address() const = 0;
  // A waiter may do the receiver's work itself, which saves the switch from its thread and back:
  // true makes the caller, and nobody else, the one who does until end_serving().
  virtual bool begin_serving() { return false; }
  virtual void end_serving() {}
  // Serves connections that belong to peers; waits up to `timeout_ns` for something to come, unless
  // the region's count of arrivals is not `seen` any more. True: a signal came.
  virtual bool serve(uint32_t /*seen*/, uint64_t /*timeout_ns*/) { return false; }
  // Ends a serve() that is waiting, because a doorbell was rung or the region is closing.
  virtual void kick() {}
  // Ends its threads and connections. No slot is written after it returns. Idempotent.
  virtual void stop() = 0;
};

}  // namespace afd_comm
