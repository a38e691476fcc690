/* Threads that stay together for a whole pass: work in parts, a barrier after each kind of work.
 *
 * Who takes a part is decided at run time (everybody has a share of neighbouring parts, and helps the others when it
 * is done), so parts must not care. A barrier spins for a moment and then yields: phases are microseconds, and a
 * sleeping thread would cost more than all the rest, but a machine that is shared may have taken the other core away.
 */
#ifndef OUTRIDER_TEAM_H
#define OUTRIDER_TEAM_H

#include "vectors.h"

#include <sched.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    MEMBERS = 64, /* threads of a team, at most */
    SPINS = 20000, /* looks at a barrier before the core is offered to others */
};

typedef struct {
    _Alignas(64) int64_t taken; /* parts of a member's share that somebody has begun */
} Share;

typedef struct {
    Share shares[MEMBERS];
    _Alignas(64) int64_t arrived;
    _Alignas(64) int64_t phase;
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

/* Nobody leaves before everybody has come; the last one opens the shares for the next work. */
static void meet(const Member *m) {
    Team *team = m->team;
    if (m->size == 1) {
        team->shares[0].taken = 0;
        return;
    }
    const int64_t phase = __atomic_load_n(&team->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == m->size) {
        for (int64_t i = 0; i < m->size; i++) team->shares[i].taken = 0;
        team->arrived = 0;
        __atomic_store_n(&team->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int64_t looks = 0; __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE) == phase; looks++) {
        if (looks < SPINS) relax();
        else sched_yield();
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
