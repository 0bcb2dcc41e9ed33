#include "verbs_progress.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>

namespace afd_comm {
namespace {

constexpr int kBatch = 16;
// Longest sleep, in case a device loses an event.
constexpr int kSleepMs = 100;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

void pin(pthread_t thread, const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus)
    if (cpu < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(cpu), &set);
  // Only a preference: the thread also works if the kernel refuses.
  if (CPU_COUNT(&set) != 0) pthread_setaffinity_np(thread, sizeof set, &set);
}

}  // namespace

std::vector<int> parse_cpulist(const std::string& text) {
  std::vector<int> out;
  std::istringstream in(text);
  int first = 0;
  while (in >> first) {
    int last = first;
    if (in.peek() == '-') in.ignore() >> last;
    for (int cpu = first; in && cpu <= last; ++cpu) out.push_back(cpu);
    if (in.peek() != ',') break;
    in.ignore();
  }
  return out;
}

std::vector<int> cpus_near(const std::string& device) {
  const std::string node = first_line("/sys/class/infiniband/" + device + "/device/numa_node");
  if (node.empty() || node[0] == '-') return {};
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {};
  std::vector<int> out;
  for (const int cpu :
       parse_cpulist(first_line("/sys/devices/system/node/node" + node + "/cpulist")))
    if (cpu < CPU_SETSIZE && CPU_ISSET(static_cast<std::size_t>(cpu), &allowed)) out.push_back(cpu);
  return out;
}

Progress::Progress(const Verbs& verbs, ib::CompChannel* channel, const std::string& name,
                   const std::vector<int>& cpus, uint64_t spin_ns)
    : verbs_(verbs),
      channel_(channel),
      spin_ns_(spin_ns),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_)
    throw CommError("cannot open an eventfd: " + errno_text(errno) +
                    "; raise the open-files limit");
  thread_ = start_thread("afd-" + name, [this] { run(); });
  pin(thread_.native_handle(), cpus);
}

Progress::~Progress() {
  stop_.store(true, std::memory_order_release);
  changed(std::unique_lock<std::mutex>(mutex_), false);
  thread_.join();
}

void Progress::add(ib::Cq* cq, CompletionSink* sink) {
  std::unique_lock<std::mutex> lock(mutex_);
  entries_.push_back(Entry{cq, sink});
  changed(std::move(lock), false);
}

void Progress::remove(ib::Cq* cq) {
  std::unique_lock<std::mutex> lock(mutex_);
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(),
                                [cq](const Entry& entry) { return entry.cq == cq; }),
                 entries_.end());
  changed(std::move(lock), true);
}

void Progress::changed(std::unique_lock<std::mutex> lock, bool wait) {
  const uint64_t mine = version_.fetch_add(1, std::memory_order_release) + 1;
  const uint64_t one = 1;
  static_cast<void>(!write(wake_.get(), &one, sizeof one));
  if (wait) taken_.wait(lock, [this, mine] { return seen_ >= mine; });
}

void Progress::take_changes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  polled_ = entries_;
  seen_ = version_.load(std::memory_order_relaxed);
  taken_.notify_all();
}

bool Progress::poll_all() {
  bool any = false;
  ib::Wc completions[kBatch];
  for (const Entry& entry : polled_) {
    const int n = verbs_.poll_cq(entry.cq, kBatch, completions);
    for (int i = 0; i < n; ++i) entry.sink->on_completion(completions[i]);
    any = any || n > 0;
  }
  return any;
}

void Progress::run() {
  uint64_t busy_until = 0;
  uint64_t version = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    if (version_.load(std::memory_order_acquire) != version) {
      take_changes();
      version = seen_;
    }
    if (poll_all()) {
      busy_until = now_ns() + spin_ns_;
      continue;
    }
    if (!polled_.empty() && now_ns() < busy_until) {
      relax();
      continue;
    }
    sleep();
    busy_until = now_ns() + spin_ns_;
  }
}

void Progress::sleep() {
  for (const Entry& entry : polled_) verbs_.req_notify_cq(entry.cq, 0);
  // Completions from before events were requested raise no event.
  if (poll_all()) return;
  pollfd fds[2] = {{wake_.get(), POLLIN, 0}, {channel_->fd, POLLIN, 0}};
  if (poll(fds, 2, kSleepMs) <= 0) return;
  uint64_t count = 0;
  static_cast<void>(!read(wake_.get(), &count, sizeof count));
  ib::Cq* cq = nullptr;
  void* context = nullptr;
  while (fds[1].revents != 0 && verbs_.get_cq_event(channel_, &cq, &context) == 0)
    verbs_.ack_cq_events(cq, 1);
}

}  // namespace afd_comm
