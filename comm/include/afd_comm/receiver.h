// Interface of a backend's receiving side: something that writes into the region on behalf of
// remote peers. (shm has none: its peers write by themselves.)
#pragma once

#include <string>

namespace afd_comm {

class Receiver {
 public:
  virtual ~Receiver() = default;
  // What a peer needs to connect.
  virtual std::string address() const = 0;
  // Ends its threads and connections. No slot is written after it returns. Idempotent.
  virtual void stop() = 0;
};

}  // namespace afd_comm
