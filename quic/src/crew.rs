//! Who drives: the threads that wait on one endpoint, and its background thread.
//!
//! Invariants, all under the endpoint's lock:
//! * At most one thread is leader; only the leader takes datagrams in and runs timers. Anybody who
//!   holds the lock may hand data to the protocol and transmit.
//! * A leader that gave up the lock (to yield or to sleep) may find on return that another leads;
//!   it then follows. So leadership can be taken from a thread at any time without asking it.
//! * While the leader sleeps, `nap` says until when and whether it minds a writable socket. Whoever
//!   makes that insufficient wakes it.
//! * When nobody leads, the background thread takes over within about two milliseconds. Unless it
//!   is parked, it looks at least that often; and it parks only while somebody leads, who wakes it
//!   on leaving.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::waiter::Waiter;

pub struct Nap {
    until: Option<Instant>,
    writable: bool,
}

pub struct Crew {
    leader: Option<Arc<Waiter>>,
    nap: Option<Nap>,
    followers: Vec<Arc<Waiter>>,
    /// Waiters of threads that are not here now, kept for the next ones.
    spare: Vec<Arc<Waiter>>,
    /// None once the endpoint is closed and that thread has ended.
    background: Option<Arc<Waiter>>,
    pub parked: bool,
    /// The background thread is to drive now, not after its usual delay.
    pub summoned: bool,
    /// Threads inside a wait.
    pub inside: usize,
    /// Counts leaderships, so that the background thread can tell a long one.
    pub stints: u64,
    /// About when somebody last drove.
    pub driven: Instant,
}

impl Crew {
    pub fn new() -> io::Result<Self> {
        Ok(Crew {
            leader: None,
            nap: None,
            followers: Vec::new(),
            spare: Vec::new(),
            background: Some(Arc::new(Waiter::new()?)),
            parked: false,
            summoned: false,
            inside: 0,
            stints: 0,
            driven: Instant::now(),
        })
    }

    /// For the background thread itself.
    pub fn background(&self) -> Option<Arc<Waiter>> {
        self.background.clone()
    }

    fn is_background(&self, waiter: &Arc<Waiter>) -> bool {
        let background = self.background.as_ref();
        background.is_some_and(|b| Arc::ptr_eq(b, waiter))
    }

    fn wake_background(&self) {
        if let Some(background) = &self.background {
            background.wake();
        }
    }

    pub fn arrive(&mut self, eager: bool) -> io::Result<Arc<Waiter>> {
        let waiter = match self.spare.pop() {
            Some(waiter) => waiter,
            None => Arc::new(Waiter::new()?),
        };
        waiter.set_eager(eager);
        self.inside += 1;
        Ok(waiter)
    }

    /// One that does not lead may have been woken to, and leave for another reason before it did (a
    /// signal, the end of its slice): if nobody leads, that call is passed on.
    pub fn depart(&mut self, waiter: Arc<Waiter>) {
        self.unfollow(&waiter);
        if self.leads(&waiter) {
            self.resign(&waiter);
        } else if self.leader.is_none() {
            self.appoint(&waiter);
        }
        self.inside -= 1;
        // Forget a wake-up that came too late to matter.
        waiter.get_up();
        self.spare.push(waiter);
    }

    pub fn led(&self) -> bool {
        self.leader.is_some()
    }

    pub fn leads(&self, waiter: &Arc<Waiter>) -> bool {
        self.leader.as_ref().is_some_and(|l| Arc::ptr_eq(l, waiter))
    }

    /// Become or stay leader if nobody leads, the background thread does, or a patient thread does
    /// and this one is eager (the patient one costs it a hop to another thread per message).
    pub fn lead(&mut self, waiter: &Arc<Waiter>) -> bool {
        match &self.leader {
            Some(leader) if Arc::ptr_eq(leader, waiter) => return true,
            Some(leader) if !self.is_background(leader) && (leader.eager() || !waiter.eager()) => {
                return false
            }
            _ => {}
        }
        self.unfollow(waiter);
        let former = self.leader.replace(waiter.clone());
        self.nap = None;
        // Still asleep, it does not know yet; but it has to be found when the endpoint closes.
        if let Some(former) = former.filter(|f| !self.is_background(f)) {
            self.follow(&former);
        }
        true
    }

    pub fn follow(&mut self, waiter: &Arc<Waiter>) {
        if !self.followers.iter().any(|f| Arc::ptr_eq(f, waiter)) {
            self.followers.push(waiter.clone());
        }
    }

    fn unfollow(&mut self, waiter: &Arc<Waiter>) {
        self.followers.retain(|f| !Arc::ptr_eq(f, waiter));
    }

    fn resign(&mut self, waiter: &Arc<Waiter>) {
        self.leader = None;
        self.nap = None;
        self.stints += 1;
        self.appoint(waiter);
    }

    /// Nobody leads and `leaving` goes: see to a successor. An eager thread that leaves will be back
    /// in a moment: waking a patient follower each time would cost both of them more than it gains,
    /// so that one is left to the background thread's next look.
    fn appoint(&self, leaving: &Arc<Waiter>) {
        let next = self.followers.iter().find(|f| f.eager());
        let next = next.or_else(|| self.followers.first().filter(|_| !leaving.eager()));
        match next {
            Some(follower) => follower.wake(),
            None if self.parked => self.wake_background(),
            None => {}
        }
    }

    /// Have the background thread drive now rather than at its next look.
    pub fn call_background(&mut self) {
        if self.leader.is_none() {
            self.summoned = true;
            self.wake_background();
        }
    }

    pub fn asleep(&mut self, until: Option<Instant>, writable: bool) {
        self.nap = Some(Nap { until, writable });
    }

    pub fn awake(&mut self, waiter: &Arc<Waiter>) {
        if self.leads(waiter) {
            self.nap = None;
        }
    }

    /// The next timer is `next`, and sends are `blocked` or not: would the leader oversleep that?
    pub fn rouse(&mut self, next: Option<Instant>, blocked: bool, unfinished: bool) {
        let (Some(nap), Some(leader)) = (&self.nap, &self.leader) else {
            return;
        };
        let late = match (next, nap.until) {
            (Some(next), Some(until)) => next < until,
            (Some(_), None) => true,
            (None, _) => false,
        };
        if late || unfinished || (blocked && !nap.writable) {
            leader.wake();
        }
    }

    /// Everybody: the endpoint is closed.
    pub fn wake_all(&self) {
        for waiter in self.followers.iter().chain(&self.leader) {
            waiter.wake();
        }
        self.wake_background();
    }

    /// Nobody is inside and the background thread has ended: the descriptors go.
    pub fn disband(&mut self) {
        self.leader = None;
        self.background = None;
        self.spare.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A crew with a leader of the given temper, asleep for ten seconds.
    fn sleeping(eager: bool) -> (Crew, Arc<Waiter>, Instant) {
        let mut crew = Crew::new().unwrap();
        let leader = crew.arrive(eager).unwrap();
        assert!(crew.lead(&leader));
        assert!(leader.lie_down());
        let until = Instant::now() + Duration::from_secs(10);
        crew.asleep(Some(until), false);
        (crew, leader, until)
    }

    /// `lie_down` refuses exactly when the waiter was woken since.
    fn woken(waiter: &Waiter) -> bool {
        !waiter.lie_down()
    }

    #[test]
    fn an_earlier_timer_rouses_the_leader() {
        let (mut crew, leader, until) = sleeping(false);
        crew.rouse(Some(until), false, false);
        assert!(!woken(&leader));
        crew.rouse(Some(until - Duration::from_secs(1)), false, false);
        assert!(woken(&leader));
    }

    #[test]
    fn a_blocked_transmit_rouses_a_leader_that_does_not_mind_a_writable_socket() {
        let (mut crew, leader, until) = sleeping(false);
        crew.rouse(Some(until), true, false);
        assert!(woken(&leader));
        crew.asleep(Some(until), true);
        crew.rouse(Some(until), true, false);
        assert!(!woken(&leader));
    }

    #[test]
    fn work_left_over_rouses_the_leader() {
        let (mut crew, leader, until) = sleeping(false);
        crew.rouse(Some(until), false, true);
        assert!(woken(&leader));
    }

    #[test]
    fn an_eager_thread_takes_over_from_a_patient_one_only() {
        let (mut crew, patient, _) = sleeping(false);
        let other = crew.arrive(false).unwrap();
        assert!(!crew.lead(&other));
        let eager = crew.arrive(true).unwrap();
        assert!(crew.lead(&eager));
        assert!(!crew.leads(&patient));
        assert!(!crew.lead(&patient));
        let rival = crew.arrive(true).unwrap();
        assert!(!crew.lead(&rival));
    }

    #[test]
    fn anybody_takes_over_from_the_background_thread() {
        let mut crew = Crew::new().unwrap();
        let background = crew.background().unwrap();
        assert!(crew.lead(&background));
        let patient = crew.arrive(false).unwrap();
        assert!(crew.lead(&patient));
        assert!(!crew.lead(&background));
    }

    #[test]
    fn a_patient_leader_hands_over_and_an_eager_one_leaves_patient_followers_alone() {
        let (mut crew, leader, _) = sleeping(false);
        let follower = crew.arrive(false).unwrap();
        crew.follow(&follower);
        crew.depart(leader);
        assert!(woken(&follower));
        let eager = crew.arrive(true).unwrap();
        assert!(crew.lead(&eager));
        crew.parked = true;
        crew.depart(eager);
        assert!(!woken(&follower));
        assert!(woken(&crew.background().unwrap()), "nobody would drive");
    }

    #[test]
    fn a_successor_that_leaves_without_leading_passes_the_lead_on() {
        let (mut crew, leader, _) = sleeping(false);
        let (first, second) = (crew.arrive(false).unwrap(), crew.arrive(false).unwrap());
        crew.follow(&first);
        crew.follow(&second);
        crew.parked = true;
        crew.depart(leader);
        assert!(woken(&first));
        assert!(!woken(&second));
        second.get_up();
        crew.depart(first);
        assert!(woken(&second));
        assert!(!woken(&crew.background().unwrap()));
        crew.background().unwrap().get_up();
        crew.depart(second);
        assert!(woken(&crew.background().unwrap()), "nobody would drive");
    }

    #[test]
    fn a_follower_that_leaves_while_somebody_leads_wakes_nobody() {
        let (mut crew, leader, _) = sleeping(false);
        let (first, second) = (crew.arrive(false).unwrap(), crew.arrive(false).unwrap());
        crew.follow(&first);
        crew.follow(&second);
        crew.parked = true;
        crew.depart(first);
        assert!(!woken(&second));
        assert!(crew.leads(&leader));
        assert!(!woken(&crew.background().unwrap()));
    }
}
