// glibc 2.30: waiting until a time of a chosen clock, as std::condition_variable does. Before, it was the real time's.
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <time.h>

enum { SECOND = 1000000000 };

static struct timespec sum(struct timespec a, struct timespec b, int sign) {
  struct timespec result = {a.tv_sec + sign * b.tv_sec, a.tv_nsec + sign * b.tv_nsec};
  if (result.tv_nsec < 0) {
    result.tv_nsec += SECOND;
    result.tv_sec -= 1;
  } else if (result.tv_nsec >= SECOND) {
    result.tv_nsec -= SECOND;
    result.tv_sec += 1;
  }
  return result;
}

// When `until` will be in real time. A wait ends at the wrong moment where somebody sets that clock meanwhile.
static struct timespec in_real_time(clockid_t clock, const struct timespec* until) {
  struct timespec now, real;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  return sum(real, sum(*until, now, -1), 1);
}

int pthread_cond_clockwait(
    pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const struct timespec* until) {
  const struct timespec real = in_real_time(clock, until);
  return pthread_cond_timedwait(condition, mutex, &real);
}

int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const struct timespec* until) {
  const struct timespec real = in_real_time(clock, until);
  return pthread_mutex_timedlock(mutex, &real);
}

int pthread_rwlock_clockrdlock(pthread_rwlock_t* lock, clockid_t clock, const struct timespec* until) {
  const struct timespec real = in_real_time(clock, until);
  return pthread_rwlock_timedrdlock(lock, &real);
}

int pthread_rwlock_clockwrlock(pthread_rwlock_t* lock, clockid_t clock, const struct timespec* until) {
  const struct timespec real = in_real_time(clock, until);
  return pthread_rwlock_timedwrlock(lock, &real);
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const struct timespec* until) {
  const struct timespec real = in_real_time(clock, until);
  return sem_timedwait(semaphore, &real);
}
