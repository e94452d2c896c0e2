// The timeline of one step of a plan, to the femtosecond: what src/gradwire/sim/replay.py says in Python, with the same result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace gradwire_planner {

using Time = std::int64_t;  // femtoseconds
using Key = std::int64_t;   // place in the launch order

enum Resource { COMPUTE, POOL, INTRA, INTER, RESOURCES };

constexpr Time kNever = Time{1} << 62;  // sums of times stay below it: Line::fits
constexpr int kPhaseBits = 2;           // an option has at most four link tasks
constexpr int kMostPhases = (1 << kPhaseBits) - 1;
constexpr int kKeyBits = 40;
constexpr Key kLate = 2;  // urgency of what goes behind backward

struct Task {
  Time length;
  int resource, urgency, phase;
};

struct Program {
  std::vector<Task> tasks;
  std::vector<int> links;  // of each link task
  Time busy[RESOURCES] = {0, 0, 0, 0};
  Time chain = 0;  // all tasks, one after the other
  int codecs = 0;
};

template <class T>
struct Heap {  // the least first
  std::vector<T> items;
  bool empty() const { return items.empty(); }
  const T& front() const { return items.front(); }
  void push(T item) {
    items.push_back(item);
    std::push_heap(items.begin(), items.end(), std::greater<T>());
  }
  T pop() {
    std::pop_heap(items.begin(), items.end(), std::greater<T>());
    const T item = items.back();
    items.pop_back();
    return item;
  }
};

using Timed = std::pair<Time, Key>;

// All there is at the moment when a bucket gets ready, before it does anything.
struct State {
  Time now = 0, finish = 0;
  int part = 0;
  int open = 0;  // buckets before this one are done
  Heap<Key> ready;
  Heap<Timed> coming, pool;
  Heap<Time> workers;
  Time free[RESOURCES] = {0, 0, 0, 0}, spent[RESOURCES] = {0, 0, 0, 0};
  Key begun[RESOURCES] = {-1, -1, -1, -1};  // the last exchange
  Key due[RESOURCES] = {-1, -1, -1, -1};    // the exchange whose turn it is
  std::vector<int> at;                    // of buckets from `open` on: the task under way
  std::vector<Time> waits;                // of the same: since when an exchange waits for its turn, or -1
};

// What is known before a run.
struct Known {
  Time step;                       // of an earlier run that was recorded
  int alike;                       // from this bucket on its programs were the same
  Time tail[RESOURCES];            // in which a link does not work, at least, after the exchange with this key began
  Key tail_from[RESOURCES];
  const Time* rest = nullptr;      // by key: from an exchange's begin to the step's end, at least
};

// One model's computation, and the programs its buckets may have.
struct Line {
  std::vector<Time> after;  // when each gradient would be ready if there were nothing but computation
  int workers = 1;
  std::vector<std::unique_ptr<Program>> programs;

  bool fits(double femtoseconds) const { return femtoseconds + static_cast<double>(after.back()) < 4e18; }
};

inline Key launch_key(Key bucket, int phase, int skew) { return (bucket + skew * phase) << kPhaseBits | phase; }

inline int phase_of(Key key) { return static_cast<int>(key & kMostPhases); }

inline int bucket_of(Key key, int skew) { return static_cast<int>(key >> kPhaseBits) - skew * phase_of(key); }

// A plan: programs by bucket, and how many gradients must be there before each is ready.
class Buckets {
 public:
  Buckets(std::vector<int> releases, int skew)
      : releases(std::move(releases)), skew(skew), programs_(this->releases.size(), nullptr), tasks_(this->releases.size()) {
    for (const int link : {INTRA, INTER}) launched_[link].assign(launch_key(count(), kMostPhases, skew) / 64 + 1, 0);
  }

  int count() const { return static_cast<int>(programs_.size()); }
  const Program* at(int bucket) const { return programs_[bucket]; }
  const Task* tasks(int bucket) const { return tasks_[bucket].first; }
  int task_count(int bucket) const { return tasks_[bucket].count; }
  const Time* busy() const { return busy_; }  // of each resource, in all programs

  void set(int bucket, const Program* program) {
    if (const Program* old = programs_[bucket]) enter(bucket, *old, -1);
    programs_[bucket] = program;
    tasks_[bucket] = {program->tasks.data(), static_cast<int>(program->tasks.size())};
    enter(bucket, *program, 1);
  }

  // Above all keys.
  Key keys() const { return static_cast<Key>(launched_[INTER].size()) * 64; }

  // The key of the link's exchange after this one; -1 if there is none.
  Key due_after(int link, Key key) const {
    const std::vector<std::uint64_t>& words = launched_[link];
    std::size_t at = static_cast<std::size_t>(key + 1) / 64;
    if (at >= words.size()) return -1;
    std::uint64_t word = words[at] & (~std::uint64_t{0} << ((key + 1) % 64));
    while (word == 0) {
      if (++at == words.size()) return -1;
      word = words[at];
    }
    return static_cast<Key>(at * 64) + __builtin_ctzll(word);
  }

  std::vector<int> releases;
  int skew;

 private:
  struct Tasks {
    const Task* first = nullptr;
    int count = 0;
  };
  std::vector<const Program*> programs_;
  std::vector<Tasks> tasks_;  // of each bucket's program
  std::vector<std::uint64_t> launched_[RESOURCES];  // a bit for each key at which the link has an exchange
  Time busy_[RESOURCES] = {0, 0, 0, 0};

  void enter(int bucket, const Program& program, int sign) {
    for (int r = 0; r < RESOURCES; r++) busy_[r] += sign * program.busy[r];
    for (int phase = 0; phase < static_cast<int>(program.links.size()); phase++) {
      const Key key = launch_key(bucket, phase, skew);
      launched_[program.links[phase]][key / 64] ^= std::uint64_t{1} << (key % 64);
    }
  }
};

class Step {
 public:
  explicit Step(const Line& line) : line_(line) {}

  Time length = 0;                  // of the last run, if it came to its end
  std::vector<Time> begins, ends;   // of a recorded run: each bucket's first exchange began, its last one ended

  // Whether the step ends by `limit`. Begins where bucket `first` gets ready, with the state of an earlier run. known: what makes
  // it shorter to find out. Recorded: fills `states` from `first` on.
  template <bool kRecord>
  bool run(const Buckets& buckets, Time limit, std::vector<State>& states, int first, const Known* known = nullptr) {
    buckets_ = &buckets;
    known_ = known;
    const int count = buckets.count();
    Time total[RESOURCES];
    for (int r = 0; r < RESOURCES; r++) total[r] = buckets.busy()[r];
    total[COMPUTE] += line_.after.back() - line_.after.front();
    at_.assign(count, -1);
    waits_.assign(count, -1);
    if (kRecord) {
      states.resize(count);
      begins.resize(count);
      ends.resize(count);
    }
    restore(first > 0 ? &states[first] : nullptr);
    for (int r = 0; r < RESOURCES; r++) left_[r] = total[r] - now_.spent[r];
    // programs that changed may have put their exchanges before the one whose turn it was
    for (const int link : {INTRA, INTER}) now_.due[link] = buckets.due_after(link, now_.begun[link]);
    over_ = 0;
    const std::vector<Time>& after = line_.after;
    const int last = static_cast<int>(after.size()) - 1;
    int following = first;
    while (over_ <= limit) {
      while (following < count && buckets.releases[following] == now_.part) {
        if (kRecord) save(states[following], following, total);
        if (known != nullptr && goes_on_like(states[following], following, known->alike)) {
          length = known->step + now_.now - states[following].now;
          return length <= limit;
        }
        next<kRecord>(following++, now_.now);
      }
      while (!now_.pool.empty() && now_.pool.front().first <= now_.now) take_in_pool<kRecord>();
      while (!now_.coming.empty() && now_.coming.front().first <= now_.now) now_.ready.push(now_.coming.pop().second);
      if (!now_.ready.empty() && (now_.ready.front() >> kKeyBits < kLate || now_.part == last)) {
        const int bucket = bucket_of(now_.ready.pop() & ((Key{1} << kKeyBits) - 1), buckets.skew);
        spend(buckets.tasks(bucket)[at_[bucket]].length);
        next<kRecord>(bucket, now_.now);
      } else if (now_.part < last) {
        // as many gradients as nothing can come between
        int until = following < count ? buckets.releases[following] : last;
        if (until > now_.part + 1 && !(now_.coming.empty() && now_.pool.empty())) {
          const Time reached = soonest() - now_.now + after[now_.part];
          const auto found = std::lower_bound(after.begin() + now_.part + 1, after.begin() + until, reached);
          until = static_cast<int>(found - after.begin());
        }
        spend(after[until] - after[now_.part]);
        now_.part = until;
      } else if (!(now_.coming.empty() && now_.pool.empty())) {
        now_.now = soonest();
      } else {
        break;
      }
    }
    length = std::max(now_.finish, now_.now);
    return std::max(length, over_) <= limit;
  }

 private:
  const Line& line_;
  const Buckets* buckets_ = nullptr;
  const Known* known_ = nullptr;
  State now_;
  std::vector<int> at_;
  std::vector<Time> waits_;
  Time left_[RESOURCES] = {0, 0, 0, 0}, over_ = 0;

  Time soonest() const {
    if (now_.pool.empty()) return now_.coming.front().first;
    if (now_.coming.empty()) return now_.pool.front().first;
    return std::min(now_.coming.front().first, now_.pool.front().first);
  }

  void restore(const State* state) {
    if (state == nullptr) {
      now_ = State();
      now_.now = line_.after.front();
      now_.workers.items.assign(line_.workers, 0);
      return;
    }
    now_ = *state;
    std::copy(state->at.begin(), state->at.end(), at_.begin() + state->open);
    std::copy(state->waits.begin(), state->waits.end(), waits_.begin() + state->open);
  }

  void save(State& state, int bucket, const Time* total) {
    while (now_.open < bucket && at_[now_.open] == buckets_->task_count(now_.open))
      now_.open++;
    now_.at.assign(at_.begin() + now_.open, at_.begin() + bucket);
    now_.waits.assign(waits_.begin() + now_.open, waits_.begin() + bucket);
    for (int r = 0; r < RESOURCES; r++) now_.spent[r] = total[r] - left_[r];
    state = now_;
  }

  // Whether everything is as it was in the earlier run at the same bucket, but for being so much later or earlier: then the rest
  // of the step is the same, as much later or earlier. All that was before now is alike. May say no where it is so.
  bool goes_on_like(const State& then, int bucket, int alike_from) const {
    const Time later = now_.now - then.now;
    const auto alike = [&](Time mine, Time its) { return std::max(mine, now_.now) == std::max(its, then.now) + later; };
    if (then.open < alike_from || now_.open > then.open) return false;
    for (const int link : {INTRA, INTER})
      if (now_.due[link] != then.due[link] || !alike(now_.free[link], then.free[link])) return false;
    if (now_.ready.items != then.ready.items || !alike(now_.finish, then.finish)) return false;
    const auto alike_key = [&](const Timed& mine, const Timed& its) {
      return mine.second == its.second && mine.first == its.first + later;
    };
    for (const auto queue : {&State::coming, &State::pool}) {
      const std::vector<Timed>&mine = (now_.*queue).items, &its = (then.*queue).items;
      if (!std::equal(mine.begin(), mine.end(), its.begin(), its.end(), alike_key)) return false;
    }
    for (std::size_t worker = 0; worker < then.workers.items.size(); worker++)
      if (!alike(now_.workers.items[worker], then.workers.items[worker])) return false;
    for (int b = now_.open; b < then.open; b++)
      if (at_[b] != buckets_->task_count(b)) return false;
    for (int b = then.open; b < bucket; b++) {
      const Time waits = then.waits[b - then.open];
      if (at_[b] != then.at[b - then.open] || (waits < 0) != (waits_[b] < 0)) return false;
      if (waits >= 0 && !alike(waits_[b], waits)) return false;
    }
    return true;
  }

  void spend(Time length) {
    now_.now += length;
    left_[COMPUTE] -= length;
    over_ = std::max(over_, now_.now + left_[COMPUTE]);
  }

  // A worker of the pool does what was ready first.
  template <bool kRecord>
  void take_in_pool() {
    const Timed task = now_.pool.pop();
    const int bucket = bucket_of(task.second, buckets_->skew);
    const Time end = std::max(task.first, now_.workers.pop()) + buckets_->tasks(bucket)[at_[bucket]].length;
    now_.workers.push(end);
    next<kRecord>(bucket, end);
  }

  // The bucket goes on with its next task, and links do all that becomes their turn by it.
  template <bool kRecord>
  void next(int bucket, Time when) {
    unsigned changed = go_on(bucket, when);  // a bit for each link at which something came
    while (changed) {
      const int link = changed & (1u << INTRA) ? INTRA : INTER;
      changed &= ~(1u << link);
      while (now_.due[link] >= 0 && waits(now_.due[link])) changed |= serve<kRecord>(link);
    }
  }

  bool waits(Key key) const {
    const int bucket = bucket_of(key, buckets_->skew);
    return waits_[bucket] >= 0 && buckets_->tasks(bucket)[at_[bucket]].phase == phase_of(key);
  }

  // The bit of the link that it waits for, 0 if for none.
  unsigned go_on(int bucket, Time when) {
    const int at = ++at_[bucket];
    if (at == buckets_->task_count(bucket)) {
      now_.finish = std::max(now_.finish, when);
      over_ = std::max(over_, when);
      return 0;
    }
    const Task& task = buckets_->tasks(bucket)[at];
    const Key key = launch_key(bucket, task.phase, buckets_->skew);
    if (task.resource == COMPUTE) {
      now_.coming.push({when, static_cast<Key>(task.urgency) << kKeyBits | key});
    } else if (task.resource == POOL) {
      now_.pool.push({when, key});
    } else {
      waits_[bucket] = when;
      return 1u << task.resource;
    }
    return 0;
  }

  template <bool kRecord>
  unsigned serve(int link) {
    const Key key = now_.due[link];
    const int bucket = bucket_of(key, buckets_->skew), phase = phase_of(key);
    const Time begin = std::max(waits_[bucket], now_.free[link]), length = buckets_->tasks(bucket)[at_[bucket]].length;
    const Time end = now_.free[link] = begin + length;
    waits_[bucket] = -1;
    left_[link] -= length;
    const bool tailed = known_ != nullptr && key <= known_->tail_from[link];
    over_ = std::max(over_, end + left_[link] + (tailed ? known_->tail[link] : 0));
    if (known_ != nullptr && known_->rest != nullptr) over_ = std::max(over_, begin + known_->rest[key]);
    if (kRecord) {
      if (phase == 0) begins[bucket] = begin;
      if (phase == static_cast<int>(buckets_->at(bucket)->links.size()) - 1) ends[bucket] = end;
    }
    now_.begun[link] = key;
    now_.due[link] = buckets_->due_after(link, key);
    return go_on(bucket, end);
  }
};

}  // namespace gradwire_planner
