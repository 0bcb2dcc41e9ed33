// The lock of fake_ibverbs.cc.
#pragma once

#include <mutex>
#include <thread>

namespace {

// Whether threads may look for a while before they sleep: waking one takes several microseconds,
// which a NIC does not need.
bool spare_cores() {
  static const bool spare = std::thread::hardware_concurrency() > 2;
  return spare;
}

// The NIC's own threads hold it for less than a microsecond.
class Lock {
 public:
  void lock() {
    const int looks = spare_cores() ? 2000 : 0;
    for (int i = 0; i < looks; ++i)
      if (mutex_.try_lock()) return;
    mutex_.lock();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace
