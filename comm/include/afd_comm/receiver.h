// The receiving side of a backend: writes into the region on behalf of remote peers. (shm has none,
// since its peers write directly.)
#pragma once

#include <cstdint>
#include <string>

namespace afd_comm {

class Receiver {
 public:
  virtual ~Receiver() = default;
  // The address that a peer needs to connect.
  virtual std::string address() const = 0;
  // Lets a waiter do the receiver's work, which saves two thread switches. If it returns true, the
  // caller alone serves the connections until end_serving().
  virtual bool begin_serving() { return false; }
  virtual void end_serving() {}
  // Serves the connections of peers. Waits up to `timeout_ns` for data, unless the region's count
  // of arrivals differs from `seen`. Returns true if a signal arrived.
  virtual bool serve(uint32_t /*seen*/, uint64_t /*timeout_ns*/) { return false; }
  // Ends a waiting serve(), because a doorbell was rung or the region is closing.
  virtual void kick() {}
  // Ends threads and connections. After it returns, no slot is written. Idempotent.
  virtual void stop() = 0;
};

}  // namespace afd_comm
