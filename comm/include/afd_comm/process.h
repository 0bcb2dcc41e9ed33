// What the operating system provides: clock, file descriptors, machine and process identity.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace afd_comm {

// CLOCK_MONOTONIC in ns.
uint64_t now_ns();
// Like now_ns(), cheaper, but only as precise as a timer tick (1 to 4 ms).
uint64_t coarse_now_ns();
// Equal in two processes if and only if their now_ns() can be compared: boot id + time namespace.
uint64_t clock_identity();
// Returns the time `timeout_us` from now, on the clock of now_ns(). A negative timeout means now.
uint64_t deadline_after_us(int64_t timeout_us);
// Sleeps; a signal ends it early. `ns` is below a second.
void nap(uint64_t ns);
// CPUs this process may run on.
int usable_cpus();
std::string errno_text(int error);

// Tells the CPU that this is a busy wait.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
// About a microsecond of it.
inline void relax_us() {
  for (int i = 0; i < 16; ++i) relax();
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

// Equal in two processes if and only if a pid means the same in both: boot id + PID namespace.
std::string machine_identity();

// Pid and start time in one word, so that a reused pid differs. 0: no such process, or it has ended
// and waits to be reaped.
using ProcessIdentity = uint64_t;
ProcessIdentity identify_process(pid_t pid);
pid_t pid_of(ProcessIdentity identity);

// Starts a thread with all signals blocked, since signals belong to the application's threads. The
// system shows the first 15 characters of `name`. Throws CommError.
std::thread start_thread(const std::string& name, std::function<void()> body);

// Lets the thread run on these CPUs only, if the kernel agrees. Empty: no change.
void prefer_cpus(std::thread& thread, const std::vector<int>& cpus);

// Tells whether one process is alive. Polls a pidfd (0.3 us) if the kernel has them.
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
