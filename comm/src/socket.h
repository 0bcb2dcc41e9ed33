// Non-blocking sockets with deadlines.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <string>

#include "afd_comm/address.h"
#include "afd_comm/process.h"
#include "afd_comm/types.h"

namespace afd_comm {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// `numeric`: without a name service. Throws CommError.
SocketAddress resolve(const std::string& host, uint16_t port, bool numeric);
std::string host_of(const SocketAddress& address);
uint16_t port_of(const SocketAddress& address);
bool is_wildcard(const SocketAddress& address);

// Turns off Nagle's algorithm; detects a vanished host within about five seconds.
void tune(int fd);

// Longest time until an interrupt is noticed.
constexpr uint64_t kPollSliceNs = 100000000;
// Limits of a receiver: connections, and those that have not sent a valid greeting.
constexpr std::size_t kMaxConnections = 1024;
constexpr std::size_t kMaxUngreeted = 64;
constexpr uint64_t kGreetNs = 2000000000;

enum class Poll { Ready, Deadline, Interrupted };
// Waits for poll(2) `events`, in slices, and calls `interrupt` (may be null) between them.
Poll poll_until(int fd, short events, uint64_t deadline, Interrupt interrupt);

// Opens a non-blocking listener on one address of this host. `option` names the user's option in
// errors. Sets `bound` to the address with its port. Throws CommError.
Fd listen_on(const std::string& host, uint16_t port, SocketAddress& bound, const char* option);

// "host:port", without the token.
std::string place(const TcpAddress& address);
// Non-blocking and tuned. Throws CommError.
Fd connect_until(const TcpAddress& address, uint64_t deadline, Interrupt interrupt);
// Reads exactly `size` bytes of the region's answer. Throws CommError.
void receive_all(const Fd& fd, void* out, std::size_t size, uint64_t deadline,
                 const TcpAddress& from, Interrupt interrupt);

// Returns the next waiting connection of a non-blocking listener, or none. If the process has no
// descriptors left, sleeps for 5 ms, because the listener stays readable and its owner would spin.
Fd accept_connection(const Fd& listener);

}  // namespace afd_comm
