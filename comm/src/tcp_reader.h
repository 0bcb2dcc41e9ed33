// Backend tcp, receiver: a thread that reads from connections, beside the receiver's own.
#pragma once

#include <sys/epoll.h>

#include <functional>
#include <mutex>
#include <thread>

#include "tcp_connections.h"

namespace afd_comm {

class TcpReader {
 public:
  // `spin_ns`: how long the thread keeps looking after the last message before it sleeps. `tell`:
  // called when messages may have rung. Throws CommError.
  TcpReader(uint64_t spin_ns, std::function<void()> tell);
  ~TcpReader();  // drops all connections
  TcpReader(const TcpReader&) = delete;

  // Thread safe.
  void add(std::unique_ptr<TcpConnection> connection);
  // After it returns no connection of the link is read any more.
  void drop_of(const TcpPeer& peer);

 private:
  void run();

  uint64_t spin_ns_;
  std::function<void()> tell_;
  Fd epoll_;
  Fd stop_;
  std::mutex mutex_;  // guards connections_; held while reading, never while waiting
  TcpConnections connections_;
  std::thread thread_;
};

// Tells the epoll what to report of `fd`.
void watch(const Fd& epoll, int fd, uint32_t wanted = EPOLLIN, int operation = EPOLL_CTL_ADD);

}  // namespace afd_comm
