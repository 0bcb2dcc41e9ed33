// Backend tcp, receiver: connections that one thread at a time reads.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tcp_connection.h"

namespace afd_comm {

// Not thread safe.
class TcpConnections {
 public:
  std::size_t size() const { return connections_.size(); }
  TcpConnection& add(std::unique_ptr<TcpConnection> connection);
  // Null if it was dropped while an earlier event of a batch was handled.
  TcpConnection* find(int fd) const;
  std::unique_ptr<TcpConnection> take(int fd);
  void drop(int fd) { connections_.erase(fd); }
  void drop_of(const TcpPeer& peer);
  void clear() { connections_.clear(); }

  // Reads what there is, drops the connection if it must be, and returns whether anything but a
  // stripe that waits for its turn was found. `patience_ns`: how long to poll for the rest of a
  // frame that has begun to arrive.
  bool serve(int fd, uint64_t patience_ns);

  template <typename F>
  void for_each(F&& look) const {
    for (const auto& [fd, connection] : connections_) look(*connection);
  }

 private:
  std::unordered_map<int, std::unique_ptr<TcpConnection>> connections_;
};

}  // namespace afd_comm
