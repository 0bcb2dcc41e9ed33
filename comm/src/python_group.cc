// Python binding of Group.
#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>
#include <vector>

#include "afd_comm/group.h"
#include "python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace afd_comm {
namespace {

// The Python type Group: the group, the links it keeps alive, and buffers for a call's arguments.
class PyGroup {
 public:
  PyGroup(nb::list links, int64_t timeout_us) : links_(links) {
    std::vector<Link*> pointers;
    for (const nb::handle link : links) pointers.push_back(nb::cast<Link*>(link));
    // Not interrupt(): the group may later be used on the main thread.
    group_.emplace(std::move(pointers), timeout_us, signals_pending);
    flags_.resize(size());
    counts_.resize(size());
    echoes_.resize(size());
    nb::list ok;
    for (std::size_t i = 0; i < size(); ++i) ok.append(nb::cast(Status::Ok));
    all_ok_ = nb::tuple(ok);
  }

  std::size_t size() const { return group_->size(); }

  nb::tuple broadcast(const Message& message, nb::list flags, std::optional<nb::list> answer_to) {
    return post(message, flags, nullptr, answer_to, static_cast<uint64_t>(message.header.nbytes));
  }

  nb::tuple scatter(const Message& message, nb::list flags, nb::list counts,
                    std::optional<nb::list> answer_to) {
    check_length(counts, "counts");
    uint64_t total = 0;
    for (std::size_t i = 0; i < size(); ++i) {
      const long n = PyLong_AsLong(PyList_GET_ITEM(counts.ptr(), static_cast<Py_ssize_t>(i)));
      if (n == -1 && PyErr_Occurred()) throw nb::python_error();
      if (n < 0 || n > INT32_MAX) throw nb::value_error("counts must lie in [0, 2**31)");
      counts_[i] = static_cast<uint32_t>(n);
      total += static_cast<uint64_t>(n) * static_cast<uint64_t>(message.header.nbytes);
    }
    return post(message, flags, counts_.data(), answer_to, total);
  }

 private:
  void check_length(nb::list list, const char* name) const {
    if (list.size() != size())
      throw nb::value_error((std::string(name) + " has " + std::to_string(list.size()) +
                             " entries; the group has " + std::to_string(size()) + " links")
                                .c_str());
  }

  nb::tuple post(const Message& message, nb::list flags, const uint32_t* counts,
                 std::optional<nb::list> answer_to, uint64_t bytes) {
    check_length(flags, "flags");
    for (std::size_t i = 0; i < size(); ++i)
      flags_[i] = as_u64(PyList_GET_ITEM(flags.ptr(), static_cast<Py_ssize_t>(i)));
    if (answer_to) {
      check_length(*answer_to, "answer_to");
      for (std::size_t i = 0; i < size(); ++i)
        echoes_[i] = echo_of(nb::cast<const Received*>((*answer_to)[i]));
    }
    const Group::PerLink per{flags_.data(), counts, answer_to ? echoes_.data() : nullptr};
    bool good = false;
    if (!group_->may_block() && bytes * size() <= kCopyWithGil) {
      good = group_->post(message, per);
    } else {
      const nb::gil_scoped_release release;
      good = group_->post(message, per);
    }
    // A signal handler that ran during the wait may have raised.
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (good) return all_ok_;
    nb::list out;
    for (std::size_t i = 0; i < size(); ++i) out.append(nb::cast(group_->statuses()[i]));
    return nb::tuple(out);
  }

  nb::list links_;
  std::optional<Group> group_;
  std::vector<uint64_t> flags_;
  std::vector<uint32_t> counts_;
  std::vector<Echo> echoes_;
  nb::tuple all_ok_;  // the usual result, made once
};

}  // namespace

void bind_group(nb::module_& m) {
  nb::class_<PyGroup>(m, "Group")
      .def(nb::init<nb::list, int64_t>(), "links"_a, nb::kw_only(), "timeout_us"_a)
      .def("__len__", &PyGroup::size)
      .def("broadcast", &PyGroup::broadcast, "message"_a, "flags"_a, "answer_to"_a = nb::none())
      .def("scatter", &PyGroup::scatter, "message"_a, "flags"_a, "counts"_a,
           "answer_to"_a = nb::none());
}

}  // namespace afd_comm
