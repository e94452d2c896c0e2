// ByteComp's two algorithms on whole timelines: the same as src/gradwire/planner/select.py and offload.py, with the same result.
#pragma once

#include <numeric>
#include <tuple>

#include "planner_timeline.hpp"

namespace gradwire_planner {

constexpr int kOvertaken = 4;  // of so many last tensors, some exchange may be launched behind the last tensor's

// A plan in which every tensor is alone, its timeline, and its states for going on from any tensor.
struct Alone {
  Buckets buckets;
  Step step;
  std::vector<State> states;
  Time best = 0;
  std::int64_t simulated = 0;

  Alone(const Line& line, int tensors, int skew) : buckets(one_by_one(tensors), skew), step(line) {}

  static std::vector<int> one_by_one(int tensors) {
    std::vector<int> releases(tensors);
    std::iota(releases.begin(), releases.end(), 1);
    return releases;
  }

  int count() const { return buckets.count(); }

  // From where a change of this tensor can matter.
  int first_of(int tensor) const { return std::max(0, tensor - kMostPhases * buckets.skew); }

  // The step with the programs as they are, if it is no longer than `limit`, else -1. Until bucket `first` gets ready the step is
  // the recorded one. known: nullptr if nothing was recorded.
  Time try_it(Time limit, int first, const Known* known) {
    simulated++;
    return step.run<false>(buckets, limit, states, first, known) ? step.length : -1;
  }

  // The last bucket at whose release this tensor has done nothing in the recorded step. It may wait for its first exchange.
  int idle_until(int tensor) const {
    int least = tensor, most = on_link(buckets.at(tensor)->tasks[0]) ? count() - 1 : tensor;
    while (least < most) {
      const int middle = (least + most + 1) / 2;
      const State& state = states[middle];
      const bool idle = state.open <= tensor && state.progress[tensor - state.open].task == buckets.at(tensor)->tasks.data();
      idle ? least = middle : most = middle - 1;
    }
    return least;
  }

  // The last bucket, at most `most`, at whose release all is as it was in the recorded step, also with this tensor's new program.
  int same_until(int tensor, int most) const {
    int least = first_of(tensor);
    if (!on_link(buckets.at(tensor)->tasks[0])) most = std::min(most, tensor);
    while (least < most) {
      const int middle = (least + most + 1) / 2;
      same_at(middle, tensor) ? least = middle : most = middle - 1;
    }
    return least;
  }

  // Until the tensor does something, its program matters only for the turns of the others. A link must not have taken an exchange
  // whose turn is after one of the tensor's, nor must the exchange wait whose turn it is: it would have been taken.
  bool same_at(int bucket, int tensor) const {
    const State& state = states[bucket];
    Key key = launch_key(tensor, 0, buckets.skew);
    for (const Exchange& exchange : buckets.at(tensor)->exchanges) {
      if (state.begun[buckets.at(tensor)->tasks[exchange.task].resource] > key) return false;
      key += launch_key(buckets.skew, 1, 0);
    }
    for (const int link : {INTRA, INTER}) {
      const Key due = buckets.due_after(link, state.begun[link]);
      if (due == buckets.none()) continue;
      const int whose = bucket_of(due, buckets.skew), phase = phase_of(due);
      if (whose >= bucket) continue;
      if (whose == tensor) {
        if (phase == 0) return false;
        continue;
      }
      const Progress& progress = state.progress[whose - state.open];
      if (progress.since >= 0 && progress.task->phase == phase) return false;
    }
    return true;
  }

  void record(int changed) {
    step.run<true>(buckets, kNever, states, first_of(changed));
    best = step.length;
  }

  // When the last bubble began, -1 if there is none: no bucket's exchange was open then, and one begins later.
  Time last_bubble() const {
    std::vector<std::pair<Time, Time>> exchanges;
    for (int tensor = 0; tensor < count(); tensor++) exchanges.push_back({step.begins[tensor], step.ends[tensor]});
    std::sort(exchanges.begin(), exchanges.end());
    Time bubble = -1, until = kNever;
    for (const auto& [begin, end] : exchanges) {
      if (begin > until) bubble = until;
      until = until == kNever ? end : std::max(end, until);
    }
    return bubble;
  }
};

struct Row {  // what the bounds need to know of a compressed option
  Time first_encode;
  int option;
  const Program* program;
};

inline Time first_encode_of(const Program& program) {
  return program.tasks[0].resource == COMPUTE ? program.tasks[0].length : 0;
}

class Selection {
 public:
  // tables: programs by tensor, then option. sizes: by tensor, whole numbers that are equal where sizes are.
  Selection(const Line& line, std::vector<std::vector<const Program*>> tables, std::vector<int> sizes, int skew,
            bool prune, int looks)
      : alone_(line, static_cast<int>(tables.size()), skew), line_(line), tables_(std::move(tables)),
        sizes_(std::move(sizes)), prune_(prune), looks_(looks), left_(tables_.size(), true) {
    int most = 0;
    for (int size : sizes_) most = std::max(most, size);
    winners_.assign(most + 1, -1);
  }

  // order: tensors in the order of their visits. False if 64 bits might not hold a sum of times.
  bool run(const std::vector<int>& order) {
    if (!start() || !fits()) return false;
    rule_out();
    for (int tensor : order) {
      if (!left_[tensor]) continue;
      left_[tensor] = false;
      if (decide(tensor)) rule_out();
    }
    return true;
  }

  const Alone& alone() const { return alone_; }
  std::vector<int> chosen;
  std::int64_t candidates = 0, ruled_out = 0;

 private:
  Alone alone_;
  const Line& line_;
  std::vector<std::vector<const Program*>> tables_;
  std::vector<int> sizes_;
  bool prune_;
  int looks_;
  std::vector<bool> left_;
  std::vector<int> winners_;  // by size

  // All tensors with the one uncompressed option that is best for all. False if 64 bits might not hold what finding it takes.
  bool start() {
    const int tensors = alone_.count();
    int options = static_cast<int>(tables_[0].size());  // of all tensors
    for (const auto& table : tables_) options = std::min(options, static_cast<int>(table.size()));
    std::vector<int> plain;
    for (int option = 0; option < options; option++)
      if (!tables_[0][option]->codecs) plain.push_back(option);
    if (plain.empty())
      for (int option = 0; option < options; option++) plain.push_back(option);
    Time best = kNever;
    int found = -1;
    std::vector<int> long_ones;
    for (int option : plain) {
      if (!line_.fits(work(option).first)) {
        long_ones.push_back(option);
        continue;
      }
      for (int tensor = 0; tensor < tensors; tensor++) alone_.buckets.set(tensor, tables_[tensor][option]);
      const Time step = alone_.try_it(kNever, 0, nullptr);
      if (found < 0 || step < best) best = step, found = option;
    }
    if (found < 0) return false;
    for (int option : long_ones) {
      if (work(option).second < 1.01 * static_cast<double>(best)) return false;
      alone_.simulated++;  // to an end that is certainly later
    }
    for (int tensor = 0; tensor < tensors; tensor++) alone_.buckets.set(tensor, tables_[tensor][found]);
    chosen.assign(tensors, found);
    alone_.record(0);
    return true;
  }

  // Femtoseconds of an option's tasks for all tensors: one after the other, and of the link that has more to do.
  std::pair<double, double> work(int option) const {
    double all = 0, on[RESOURCES] = {0, 0, 0, 0};
    for (const auto& table : tables_) {
      all += static_cast<double>(table[option]->chain);
      for (const int link : {INTRA, INTER}) on[link] += static_cast<double>(table[option]->busy[link]);
    }
    return {all, std::max(on[INTRA], on[INTER])};
  }

  // Whether 64 bits hold every sum of times, once the best uncompressed option is known. They do if the longest programs of all
  // tensors fit together. They also do where such programs have no chance: each plan that is tried is like one whose step is no
  // longer than the best, in which no link, worker or compute has more work than that, but for one tensor; and a program that is
  // longer than the best step is not tried.
  bool fits() const {
    double sum = 0;
    Time longest = 0;
    for (const auto& table : tables_) {
      Time most = 0;
      for (const Program* program : table) {
        most = std::max(most, program->chain);
        if (!prune_ || program->chain < alone_.best) longest = std::max(longest, program->chain);
      }
      sum += static_cast<double>(most);
    }
    return line_.fits(sum) || line_.fits((4.0 + line_.workers) * static_cast<double>(alone_.best) + static_cast<double>(longest));
  }

  void rule_out() {
    const Time bubble = alone_.last_bubble();
    for (int tensor = 0; tensor < alone_.count(); tensor++) {
      if (left_[tensor] && alone_.step.ends[tensor] <= bubble && !alone_.buckets.at(tensor)->codecs) {
        left_[tensor] = false;
        ruled_out++;
      }
    }
  }

  bool decide(int tensor) {
    Time below = alone_.best;
    int codecs = 0;
    const Row* found = nullptr;
    candidates += static_cast<std::int64_t>(tables_[tensor].size());
    const Program* now = alone_.buckets.at(tensor);
    std::vector<std::tuple<Time, int, int, Row>> promising = bounds(tensor);
    const auto by_bound = [](const auto& a, const auto& b) {
      return std::tie(std::get<0>(a), std::get<1>(a), std::get<2>(a)) < std::tie(std::get<0>(b), std::get<1>(b), std::get<2>(b));
    };
    std::sort(promising.begin(), promising.end(), by_bound);
    const Key own = launch_key(tensor, kMostPhases, alone_.buckets.skew);
    const Key least = launch_key(alone_.first_of(tensor), 0, alone_.buckets.skew);
    set_rest(alone_.buckets.none() - 1, 0, tensor);
    const Known known = {alone_.best, tensor + 1, true, tensor};
    const int idle = alone_.idle_until(tensor);
    int looked_at = 0;
    for (const auto& [bound, row_codecs, option, row] : promising) {
      // the option that was best for the last tensor of this size is looked at in any case
      if (looks_ >= 0 && looked_at++ >= looks_ && option != winners_[sizes_[tensor]]) continue;
      // equal steps count only with fewer codec tasks
      const Time limit = found && row_codecs < codecs ? below : below - 1;
      if (prune_ && bound > limit) continue;
      alone_.buckets.set(tensor, row.program);
      set_rest(own, least);
      const Time step = alone_.try_it(prune_ ? limit : kNever, alone_.same_until(tensor, idle), &known);
      if (step >= 0 && step <= limit) below = step, codecs = row_codecs, found = &row;
    }
    alone_.buckets.set(tensor, found ? found->program : now);
    if (!found) return false;
    chosen[tensor] = winners_[sizes_[tensor]] = found->option;
    alone_.record(tensor);
    return true;
  }

  // For exchanges from one key down to another one, given those of later keys. without: a tensor that takes no time.
  void set_rest(Key from, Key to, int without = -1) {
    for (Key key = from; key >= to; key--)
      if (alone_.buckets.has(key)) alone_.buckets.exchange(key).rest = rest_from(key, without);
  }

  // The link takes its exchanges in order, and the tensor's tasks follow each other.
  Time rest_from(Key key, int without) const {
    const Launched* launched = alone_.buckets.exchanges();
    const int skew = alone_.buckets.skew, tensor = bucket_of(key, skew), phase = phase_of(key);
    const Time next = launched[launched[key].next].rest;
    if (tensor == without) return next;
    const std::vector<Exchange>& exchanges = alone_.buckets.at(tensor)->exchanges;
    Time behind = exchanges[phase].behind;
    if (phase + 1 < static_cast<int>(exchanges.size())) behind += launched[launch_key(tensor, phase + 1, skew)].rest;
    return launched[key].length + std::max(behind, next);
  }

  // (lower bound of the step, codec tasks, index, row) of compressed options that might shorten the step.
  std::vector<std::tuple<Time, int, int, Row>> bounds(int tensor) const {
    const Buckets& programs = alone_.buckets;
    const int count = alone_.count();
    const Program& now = *programs.at(tensor);
    const Time encode = first_encode_of(now);
    std::vector<Time> encoded(count);  // when each tensor's first encode is over, at least
    Time encodes = 0, chain_later = 0, compute = line_.after.back() + programs.busy()[COMPUTE] - now.busy[COMPUTE];
    for (int t = 0; t < count; t++) {
      encodes += first_encode_of(*programs.at(t));
      encoded[t] = line_.after[t + 1] + encodes;
      if (t > tensor) chain_later = std::max(chain_later, encoded[t] + programs.at(t)->chain - first_encode_of(*programs.at(t)));
    }
    const bool last = tensor == count - 1, own_tail = !last && tensor >= count - kOvertaken;
    struct OnLink {
      Time before = 0, own = 0, later = 0, tail = 0;  // what the link alone makes of the step, from which tensors on
    } on[RESOURCES];
    for (const int link : {INTRA, INTER}) {
      Time still = 0;
      for (int t = count - 1; t >= 0; t--) {
        still += programs.at(t)->busy[link];
        Time& end = t > tensor ? on[link].later : t == tensor ? on[link].own : on[link].before;
        end = std::max(end, encoded[t] + still);
      }
      on[link].tail = own_tail || last ? 0 : tail(*programs.at(count - 1), link);
    }
    std::vector<std::tuple<Time, int, int, Row>> found;
    for (int option = 0; option < static_cast<int>(tables_[tensor].size()); option++) {
      const Program& program = *tables_[tensor][option];
      if (!program.codecs || option == chosen[tensor]) continue;
      const Time more_encode = first_encode_of(program) - encode;
      Time bound = std::max(encoded[tensor] - encode + program.chain, chain_later + more_encode);
      bound = std::max(bound, compute + program.busy[COMPUTE]);
      for (const int link : {INTRA, INTER}) {
        const Time more = program.busy[link] - now.busy[link];
        const Time behind = last ? tail(program, link) : on[link].tail;
        bound = std::max(bound, behind + std::max({on[link].before + more, on[link].own + more + more_encode,
                                                   on[link].later + more_encode}));
      }
      if (bound < alone_.best || !prune_)
        found.push_back({bound, program.codecs, option, Row{first_encode_of(program), option, &program}});
    }
    return found;
  }

  // Least time that a link idles after the last tensor's first exchange, if the tensor has this program.
  Time tail(const Program& program, int link) const {
    int first = 0, tasks = static_cast<int>(program.tasks.size());
    while (first < tasks && program.tasks[first].resource != link) first++;
    if (first == tasks) return 0;
    const int count = alone_.count(), skew = alone_.buckets.skew;
    const Key key = launch_key(count - 1, program.tasks[first].phase, skew);
    Time behind = 0, elsewhere = 0;
    for (int tensor = std::max(0, count - kOvertaken); tensor < count - 1; tensor++)
      for (const Task& task : alone_.buckets.at(tensor)->tasks)
        if (task.resource == link && launch_key(tensor, task.phase, skew) > key) behind += task.length;
    for (int at = first; at < tasks; at++)
      if (program.tasks[at].resource != link) elsewhere += program.tasks[at].length;
    return std::max(Time{0}, elsewhere - behind);
  }
};

}  // namespace gradwire_planner
