/* Threads that stay together for a whole pass: work in parts, a barrier after each kind of work.
 *
 * Who takes a part is decided at run time (everybody has a share of neighbouring parts, and helps the others when it
 * is done), so parts must not care. A barrier spins for a moment, because phases are microseconds, and then sleeps: on
 * a machine that is shared, somebody else may have the other member's core, and a spinning thread is soon out of favour
 * with the scheduler itself.
 */
#ifndef OUTRIDER_TEAM_H
#define OUTRIDER_TEAM_H

#include "vectors.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    MEMBERS = 64, /* threads of a team, at most */
    SPINS = 2000, /* looks at a barrier before the core is left to others */
};

typedef struct {
    _Alignas(64) int64_t taken; /* parts of a member's share that somebody has begun */
} Share;

typedef struct {
    Share shares[MEMBERS];
    _Alignas(64) int32_t arrived;
    _Alignas(64) int32_t phase;
    int32_t asleep;
} Team;

typedef struct {
    Team *team; /* shared */
    int64_t me, size;
} Member;

INLINE void relax(void) {
#if defined(__SSE__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

INLINE void sleep_while(Team *team, int32_t phase) {
#if defined(__linux__)
    __atomic_add_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &team->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0); /* returns at once if it has changed */
    __atomic_sub_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
#else
    (void)team;
    (void)phase;
    sched_yield();
#endif
}

INLINE void wake(Team *team) {
#if defined(__linux__)
    if (__atomic_load_n(&team->asleep, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &team->phase, FUTEX_WAKE_PRIVATE, MEMBERS, NULL, NULL, 0);
#else
    (void)team;
#endif
}

/* Nobody leaves before everybody has come; the last one opens the shares for the next work. */
static void meet(const Member *m) {
    Team *team = m->team;
    const int32_t phase = __atomic_load_n(&team->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == m->size) {
        for (int64_t i = 0; i < m->size; i++) team->shares[i].taken = 0;
        team->arrived = 0;
        __atomic_store_n(&team->phase, phase + 1, __ATOMIC_SEQ_CST);
        wake(team);
        return;
    }
    for (int64_t looks = 0; __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE) == phase; looks++) {
        if (looks < SPINS) relax();
        else sleep_while(team, phase);
    }
}

/* All parts of a job, by all members; each of them calls this with the same arguments. */
static int each(const Member *m, Work work, const void *job, int64_t parts) {
    int failed = 0;
    for (int64_t i = 0; i < m->size; i++) {
        const int64_t owner = (m->me + i) % m->size, end = parts * (owner + 1) / m->size;
        int64_t *taken = &m->team->shares[owner].taken, part;
        while ((part = parts * owner / m->size + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < end)
            failed |= work(job, part);
    }
    meet(m);
    return failed;
}

typedef int (*Task)(const Member *member, const void *job); /* non-zero: no memory */

static int together(Task task, const void *job, int64_t threads) {
    int failed = 0;
    Team team;
    memset(&team, 0, sizeof team);
#ifdef _OPENMP
#pragma omp parallel num_threads((int)most(1, least(threads, MEMBERS))) reduction(| : failed)
    {
        PLAIN_MODE;
        failed |= task(&(Member){&team, omp_get_thread_num(), omp_get_num_threads()}, job);
        OLD_MODE;
    }
#else
    (void)threads;
    PLAIN_MODE;
    failed = task(&(Member){&team, 0, 1}, job);
    OLD_MODE;
#endif
    return failed;
}

#endif
