// The operating system's view: clock, file descriptors, machine and process identity.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace afd_comm {

// CLOCK_MONOTONIC in ns.
uint64_t now_ns();
// As now_ns(), but only as fine as a timer tick (1 to 4 ms) and cheaper.
uint64_t coarse_now_ns();
// Equal in two processes exactly when their now_ns() can be compared: boot id + time namespace.
uint64_t clock_identity();
// A point `timeout_us` from now in now_ns() units; a negative timeout means now.
uint64_t deadline_after_us(int64_t timeout_us);
// CPUs this process may run on.
int usable_cpus();
std::string errno_text(int error);

// Tells the core that this is a busy wait.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// Equal in two processes exactly when each can name the other by its pid: boot id + PID namespace.
std::string machine_identity();

// Pid and start time in one word, so that a reused pid is told apart.
// 0: no such process, or it has ended and only waits to be reaped.
using ProcessIdentity = uint64_t;
ProcessIdentity identify_process(pid_t pid);
pid_t pid_of(ProcessIdentity identity);

// A thread that takes none of the process's signals: those belong to the application's threads. The
// first 15 characters of `name` are what the system shows. Throws CommError.
std::thread start_thread(const std::string& name, std::function<void()> body);

// Tells whether one process still lives; a poll of a pidfd (0.3 us) where the kernel has them.
class ProcessWatch {
 public:
  explicit ProcessWatch(ProcessIdentity identity);
  ProcessIdentity identity() const { return identity_; }
  bool alive() const;

 private:
  ProcessIdentity identity_;
  Fd pidfd_;
  bool ended_ = false;
};

}  // namespace afd_comm
