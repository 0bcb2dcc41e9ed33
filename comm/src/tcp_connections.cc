#include "tcp_connections.h"

#include "afd_comm/types.h"

namespace afd_comm {
namespace {

// How much is read from one connection before the others get their turn.
constexpr int kReadsPerTurn = 64;

}  // namespace

TcpConnection& TcpConnections::add(std::unique_ptr<TcpConnection> connection) {
  TcpConnection& added = *connection;
  connections_[added.fd()] = std::move(connection);
  return added;
}

TcpConnection* TcpConnections::find(int fd) const {
  const auto found = connections_.find(fd);
  return found == connections_.end() ? nullptr : found->second.get();
}

std::unique_ptr<TcpConnection> TcpConnections::take(int fd) {
  const auto found = connections_.find(fd);
  std::unique_ptr<TcpConnection> connection = std::move(found->second);
  connections_.erase(found);
  return connection;
}

void TcpConnections::drop_of(const TcpPeer& peer) {
  for (auto it = connections_.begin(); it != connections_.end();)
    it = it->second->peer().get() == &peer ? connections_.erase(it) : std::next(it);
}

bool TcpConnections::serve(int fd, uint64_t patience_ns) {
  TcpConnection* const connection = find(fd);
  if (connection == nullptr) return false;
  const bool greeted = connection->greeted();
  bool keep = connection->on_readable();
  uint64_t give_up = 0;
  // Whoever greets is looked at first: another thread may have to read from it.
  for (int reads = 1; keep && greeted && reads < kReadsPerTurn;) {
    if (connection->may_have_more()) {
      ++reads;
      give_up = 0;
    } else if (!connection->lands()) {
      if (patience_ns == 0 || !connection->in_frame()) break;
      const uint64_t now = now_ns();
      if (give_up == 0) give_up = now + patience_ns;
      if (now >= give_up) break;
    }
    keep = connection->on_readable();
  }
  if (keep && connection->settle()) return !connection->stalled();
  drop(fd);
  return true;
}

}  // namespace afd_comm
