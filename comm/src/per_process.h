// One object of a kind per process, shared by its users.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>
#include <utility>

namespace afd_comm {

// Returns the process's T, or makes it. It ends with its last user. A forked child has one of its
// own: it has its parent's object, but not the threads.
template <typename T, typename Make>
std::shared_ptr<T> of_this_process(Make&& make) {
  static std::mutex& opening = *new std::mutex;
  static auto& known = *new std::pair<pid_t, std::weak_ptr<T>>;
  const std::lock_guard<std::mutex> lock(opening);
  std::shared_ptr<T> object = known.first == getpid() ? known.second.lock() : nullptr;
  if (object == nullptr) {
    object = make();
    known = {getpid(), object};
  }
  return object;
}

}  // namespace afd_comm
